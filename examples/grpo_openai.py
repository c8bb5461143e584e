"""GRPO against an OpenAI-compatible server: a small policy behind HTTP learns to copy two digits.

The server stands for vLLM or SGLang and answers as they do: text, token ids and a logprob for each token. With
`--text` it gives no ids, as many others do; then `tokenizer=` finds them. Everything is in this file.

    python examples/grpo_openai.py
    python examples/grpo_openai.py --text
"""

import argparse
import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import torch
from torch import nn

import recollect as rc
import recollect.rollout as rr

WORDS, LENGTH, GROUPS, RUNS, STEPS, GOAL = "0123456789=", 2, 16, 8, 40, 0.9


class Characters:
    """The tokenizer: a token for each character. Of Hugging Face's, `AutoTokenizer.from_pretrained(...)` does."""

    def encode(self, text):
        return [WORDS.index(character) for character in text]


class Policy(nn.Module):
    """The last three tokens in, log-probabilities of the next digit out."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3 * len(WORDS), 128), nn.Tanh(), nn.Linear(128, 10))

    def forward(self, tokens):
        x = nn.functional.one_hot(tokens[..., -3:], len(WORDS)).flatten(-2).float()
        return self.layers(x).log_softmax(-1)

    @torch.no_grad()
    def answer(self, prompt, greedy):
        tokens, logprobs = list(prompt), []
        for _ in range(LENGTH):
            log_p = self(torch.tensor(tokens))
            token = int(log_p.argmax() if greedy else torch.multinomial(log_p.exp(), 1))
            tokens.append(token)
            logprobs.append(float(log_p[token]))
        return tokens[len(prompt) :], logprobs


class Handler(BaseHTTPRequestHandler):
    """POST /v1/completions: what a server must return for its answers to be trained on."""

    protocol_version, disable_nagle_algorithm, wbufsize = "HTTP/1.1", True, -1

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = Characters().encode(asked["prompt"])
        tokens, logprobs = self.server.policy.answer(prompt, asked.get("temperature") == 0)
        choice = {"index": 0, "text": "".join(WORDS[token] for token in tokens), "finish_reason": "stop"}
        choice["logprobs"] = {"token_logprobs": logprobs}  # asked for by `logprobs`
        if self.server.gives_ids:  # asked for by `return_token_ids`
            choice |= {"prompt_token_ids": prompt, "token_ids": tokens}
        body = json.dumps({"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@rr.workflow("copy")
async def copy(task, models):
    """One run: ask once; the reward is the share of digits that are right."""
    want = task.data["prompt"][-LENGTH - 1 : -1]
    how = {"temperature": 0} if task.is_eval else {}
    [g] = await models.rollout.generate(task.data["prompt"], max_tokens=LENGTH, **how)
    return g.experience(reward=sum(a == b for a, b in zip(g.text, want)) / LENGTH)


def draw(rng, n, repeats):
    prompts = [f"{'=' * (i % 3)}{i:02d}=" for i in rng.integers(0, 100, n).tolist()]  # of unequal lengths
    return [rr.Task("copy", {"prompt": prompt}, repeat_times=repeats) for prompt in prompts]


def learn(policy, optimizer, rows):
    """The clipped surrogate over what the server sampled; its logprobs are those of the policy that acted."""
    tokens = torch.from_numpy(rows.padded("tokens")).long()
    old, acted = torch.tensor(rows.padded("logprobs")), torch.tensor(rows.padded("action_mask", False))
    advantage, prompt = torch.tensor(rows.advantage)[:, None], torch.tensor(rows.prompt_length)[:, None]
    at = (prompt + torch.arange(old.shape[1])).clamp(max=tokens.shape[1] - 1)  # rows are filled at the right
    windows = torch.stack([tokens.gather(1, at - back) for back in (3, 2, 1)], 2)  # what came before each
    chosen = tokens.gather(1, at)[..., None]
    for _ in range(4):
        log_p = policy(windows)
        ratio = (log_p.gather(2, chosen)[..., 0] - old).exp()
        gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        entropy = -(log_p.exp() * log_p).sum(-1)
        optimizer.zero_grad()
        (-(gain + 0.02 * entropy)[acted].mean()).backward()
        optimizer.step()


async def train(address, policy, tokenizer, seed):
    rng, optimizer = np.random.default_rng(seed), torch.optim.Adam(policy.parameters(), lr=0.01)
    model = rr.OpenAIModel(address, "policy", tokenizer=tokenizer)
    config = rr.Config(operators=("grpo",), seed=seed)
    async with rc.RolloutCoordinator(config, [model]) as c:
        for step in range(STEPS):
            await c.submit_batch(batch_id=step, tasks=draw(rng, GROUPS, RUNS), batch_type="train")
            result = await c.finalize_train_batch(step)
            learn(policy, optimizer, await c.sink.get(result["experience_count"]))
            await c.sync_weights()  # a server of its own gets the new weights here, as its documentation says
            reward = result["metrics"]["rollout/reward/mean"]
            if reward > GOAL:
                break
        await c.submit_batch(batch_id="last/copy", tasks=draw(rng, 100, 1), batch_type="eval")
        evaluated = (await c.finalize_eval_batch("last/copy"))["metrics"]
    await model.close()
    return step + 1, evaluated["eval/copy/reward/mean"]


def main():
    options = argparse.ArgumentParser(description="GRPO against an OpenAI-compatible server.")
    options.add_argument("--text", action="store_true", help="the server gives no token ids")
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    torch.manual_seed(chosen.seed)
    torch.set_num_threads(1)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.policy, server.gives_ids, server.daemon_threads = Policy(), not chosen.text, True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    tokenizer = Characters() if chosen.text else None
    address = f"http://127.0.0.1:{server.server_port}/v1"
    steps, right = asyncio.run(train(address, server.policy, tokenizer, chosen.seed))
    server.shutdown()
    server.server_close()
    print(f"share of digits copied after {steps} steps: {right:.2f}")
    assert right > GOAL


if __name__ == "__main__":
    main()
