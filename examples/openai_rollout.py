"""Rollouts from a model behind HTTP that answers some calls with 429, 503, silence or a dropped connection.

An OpenAI-compatible server on 127.0.0.1 serves the transformer of `grpo_copy.py`, and a judge. A train batch and a
judged eval batch go through OpenAIModel; every run ends once, whatever the server does.

    python examples/openai_rollout.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter

import numpy as np
import torch
from grpo_copy import Policy, answer, draw

import recollect.rollout as rr

GROUPS, RUNS, EVALS = 8, 8, 32
FAULTS = {5: 429, 11: 503, 17: "drop", 23: "hang", 31: 429, 47: "drop", 83: 503, 101: 429, 113: "drop"}


class Server:
    """The part of the OpenAI protocol that a rollout needs; call number n fails as `FAULTS[n]` says."""

    def __init__(self, policy):
        self.policy, self.seen = policy, Counter()
        self.n_calls = self.n_open = 0
        self.all_closed = asyncio.Event()

    async def serve(self, reader, writer):
        self.n_open += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                body = json.loads(await reader.readexactly(int(head.split("content-length:")[1].split()[0])))
                fault = FAULTS.get(self.n_calls)
                self.n_calls += 1
                self.seen[fault or "answer"] += 1
                if fault == "hang":
                    await reader.read()  # until the client has had enough
                if fault in ("hang", "drop"):
                    return
                reply = {"error": "busy"} if fault else self.reply(body)
                content = json.dumps(reply).encode()
                status = f"HTTP/1.1 {fault or 200} X\r\nRetry-After: 0\r\nContent-Length: {len(content)}"
                writer.write(f"{status}\r\n\r\n".encode() + content)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            self.n_open -= 1
            if not self.n_open:
                self.all_closed.set()

    def reply(self, body):
        if "messages" in body:  # the judge: are both lists equal?
            got, want = json.loads(body["messages"][-1]["content"])
            return {"choices": [{"message": {"content": str(float(got == want))}}]}
        [(tokens, logprobs)] = answer(self.policy, [body["prompt"]], body)
        choice = {"text": "", "token_ids": tokens.tolist(), "prompt_token_ids": body["prompt"]}
        return {"choices": [choice | {"logprobs": {"token_logprobs": logprobs.tolist()}}], "model_version": 7}


@rr.workflow("judged")
async def judged(task, models):
    """Ask the policy, then the judge; the reward is what the judge says."""
    want = task.data["answer"]
    [g] = await models.rollout.generate(task.data["prompt"], length=len(want), greedy=task.is_eval)
    text = json.dumps([g.tokens[g.prompt_length :].tolist(), want])
    [verdict] = await models["judge"].chat([{"role": "user", "content": text}])
    reward = float(verdict.text)
    return rr.Result(metrics={"score": reward}) if task.is_eval else g.experience(reward=reward)


async def rollout(seed):
    """Run both batches against a server with faults; return what the server saw."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    rng, server = np.random.default_rng(seed), Server(Policy())
    listening = await asyncio.start_server(server.serve, "127.0.0.1")
    address = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    how = {"timeout_s": 2.0, "max_connections": 2, "max_retries": 5}
    policy, judge = rr.OpenAIModel(address, "policy", **how), rr.OpenAIModel(address, "judge", **how)
    config = rr.Config(auxiliary_names=("judge",), seed=seed)
    async with rr.RolloutCoordinator(config, [policy], [[judge]]) as c:
        await c.submit_batch(batch_id=0, tasks=draw("copy", GROUPS, rng, RUNS), batch_type="train")
        tasks = [rr.Task("judged", task.data) for task in draw("copy", EVALS, rng)]
        await c.submit_batch(batch_id="0/judged", tasks=tasks, batch_type="eval")
        trained, evaluated = await asyncio.gather(
            c.finalize_train_batch(0, timeout=60), c.finalize_eval_batch("0/judged", timeout=60)
        )
        rows = await c.sink.get(trained["experience_count"])
        models = {model.name: (model.served, model.failed) for model in c.stats().models}
        print(c.stats().runs)
    await policy.close()
    await judge.close()
    await asyncio.wait_for(server.all_closed.wait(), 10)
    listening.close()
    await listening.wait_closed()

    assert trained["ok_task_count"] == GROUPS and trained["experience_count"] == GROUPS * RUNS
    assert trained["metrics"]["rollout/retry_count"] == 0  # the client's own retries were enough
    assert evaluated["ok_task_count"] == EVALS and 0 <= evaluated["metrics"]["eval/judged/score/mean"] <= 1
    assert len(set(rows.uids.tolist())) == GROUPS * RUNS == len(rows) and set(
        rows.model_version.tolist()
    ) == {7}
    assert models[address] == (EVALS, 0) and server.n_open == 0  # the judge's: both have one address
    assert server.seen == Counter(FAULTS.values()) + Counter(answer=GROUPS * RUNS + 2 * EVALS)
    return server.seen


def main():
    options = argparse.ArgumentParser(description="Rollouts from a model behind HTTP, with faults.")
    options.add_argument("--seed", type=int, default=0)
    print(dict(asyncio.run(rollout(options.parse_args().seed))))


if __name__ == "__main__":
    main()
