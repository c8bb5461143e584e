"""A small transformer learns from random weights to copy digits, by GRPO through the rollout coordinator.

32 tasks of 16 runs a step; one batch is rolled out while the last is trained on (`max_staleness=1`). Weights go to
the rollout model through shared memory, experience comes back through a replay buffer.

    python examples/grpo_copy.py                 # copy 4 digits: at least 99 % exact within 200 steps
    python examples/grpo_copy.py --task sum      # the last digit of a + b: at least 95 % within 1,500 steps
"""

import argparse
import asyncio
import time
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import recollect as rc
import recollect.rollout as rr

TASKS = {"copy": (4, 200, 0.99), "sum": (2, 1500, 0.95)}  # digits in the prompt, steps, accuracy to reach
GROUPS, RUNS, EVALS, WIDTH, EQUALS = 32, 16, 256, 64, 10


class Policy(nn.Module):
    """Tokens in, log-probabilities of the next digit out: two causal layers, tied embeddings."""

    def __init__(self):
        super().__init__()
        how = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, **how)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.token, self.place = nn.Embedding(11, WIDTH), nn.Embedding(16, WIDTH)
        nn.init.normal_(self.token.weight, std=0.1)
        nn.init.normal_(self.place.weight, std=0.1)

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.layers(self.token(tokens) + self.place(torch.arange(length)), mask, is_causal=True)
        return F.log_softmax(x @ self.token.weight[:10].T, -1)


@torch.no_grad()
def answer(policy, prompts, sampling):
    """What a TorchModel calls: tokens and logprobs for each prompt."""
    tokens, logprobs, length, greedy = torch.tensor(prompts), [], sampling["length"], sampling["greedy"]
    for _ in range(length):
        log_p = policy(tokens)[:, -1]
        chosen = log_p.argmax(-1, keepdim=True) if greedy else torch.multinomial(log_p.exp(), 1)
        logprobs.append(log_p.gather(1, chosen))
        tokens = torch.cat([tokens, chosen], 1)
    return list(zip(tokens[:, -length:].numpy(), torch.cat(logprobs, 1).numpy()))


@rr.workflow("digits")
async def digits(task, models):
    """Ask once; the reward is the share of digits that are right, in eval whether all are."""
    want = task.data["answer"]
    [g] = await models.rollout.generate(task.data["prompt"], length=len(want), greedy=task.is_eval)
    right = np.equal(g.tokens[g.prompt_length :], want)
    if task.is_eval:
        return rr.Result(metrics={"exact": float(right.all())})
    return g.experience(reward=float(right.mean()))


def draw(name, n, rng, repeats=1):
    """Problems of a kind, as tasks."""
    given = rng.integers(0, 10, (n, TASKS[name][0])).tolist()
    answers = [row if name == "copy" else [sum(row) % 10] for row in given]
    made = [{"prompt": [*row, EQUALS], "answer": want} for row, want in zip(given, answers)]
    return [rr.Task("digits", data, repeat_times=repeats) for data in made]


def learn(policy, optimizer, rows, epochs=2, clip=0.2, explore=0.05):
    """GRPO: the clipped surrogate on group-relative advantages, with a bonus `explore` on entropy.

    Without it the policy grows sure of some wrong answers, all runs of those tasks agree, and none has an advantage.
    """
    tokens = torch.from_numpy(np.stack(rows["tokens"])).long()
    old = torch.from_numpy(np.stack(rows["logprobs"]))
    advantage, n = torch.from_numpy(rows["advantage"])[:, None], old.shape[1]
    for _ in range(epochs):
        for index in torch.randperm(len(tokens)).split(256):
            log_p = policy(tokens[index, :-1])[:, -n:]
            ratio = (log_p.gather(2, tokens[index, -n:, None])[..., 0] - old[index]).exp()
            gain = torch.min(ratio * advantage[index], ratio.clamp(1 - clip, 1 + clip) * advantage[index])
            entropy = -(log_p.exp() * log_p).sum(-1)
            optimizer.zero_grad()
            (-(gain + explore * entropy).mean()).backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()


async def train(name, steps, seed, goal):
    """Train until the goal is reached; return (step, reward, exact accuracy) of every evaluation."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    rng, policy, actor = np.random.default_rng(seed), Policy(), Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3, betas=(0.9, 0.95))
    weights = rc.ipc.SharedWeightSync.from_state_dict(policy.state_dict())
    model = rr.TorchModel(partial(answer, actor), module=actor, weights=weights, max_batch=512)
    await model.sync()
    buffer = rr.experience_buffer("memory", capacity=2 * GROUPS * RUNS, max_tokens=16)
    config = rr.Config(sink=buffer, runners=512, operators=("grpo",), max_staleness=1, seed=seed)
    curve, start = [], time.monotonic()
    async with rr.RolloutCoordinator(config, [model]) as c:
        await c.submit_batch(batch_id=0, tasks=draw(name, GROUPS, rng, RUNS), batch_type="train")
        for step in range(steps):
            ahead = draw(name, GROUPS, rng, RUNS)
            await c.submit_batch(batch_id=step + 1, tasks=ahead, batch_type="train")
            result = await c.finalize_train_batch(step)
            rows = buffer[np.arange(-result["experience_count"], 0)]
            assert (c.model_version - rows["model_version"] <= 1).all()
            if result["experience_count"]:
                await asyncio.to_thread(learn, policy, optimizer, rows)
            weights.write_weights(policy.state_dict())
            await c.sync_weights()
            if (step + 1) % 5 and step + 1 < steps:
                continue
            await c.submit_batch(batch_id=f"{step}/{name}", tasks=draw(name, EVALS, rng), batch_type="eval")
            evaluated = (await c.finalize_eval_batch(f"{step}/{name}"))["metrics"]
            point = step + 1, result["metrics"]["rollout/reward/mean"], evaluated[f"eval/{name}/exact/mean"]
            print("step {:4}  reward {:.3f}  exact {:.3f}  {:.0f} s".format(*point, time.monotonic() - start))
            curve.append(point)
            if point[2] >= goal:
                break
        await c.abort_batch(step + 1, reason="trained")
        runs = c.stats().runs
        assert runs.submitted == runs.delivered + runs.filtered + runs.unused + runs.cancelled
    await model.close()
    weights.cleanup()
    return curve


def main():
    options = argparse.ArgumentParser(description="Copy digits, learned by GRPO through the coordinator.")
    options.add_argument("--task", choices=TASKS, default="copy")
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    _, steps, goal = TASKS[chosen.task]
    curve = asyncio.run(train(chosen.task, steps, chosen.seed, goal))
    assert curve[-1][2] >= goal, f"{curve[-1][2]:.3f} exact after {steps} steps, {goal} wanted"


if __name__ == "__main__":
    main()
