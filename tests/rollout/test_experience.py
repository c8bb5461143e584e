"""Experience to bytes and back, operators on it, and the sinks it goes to."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rollout.make import experience, run

import recollect as rc
import recollect.rollout as rr
from recollect import _core
from recollect.errors import ClosedError, DeadlineError, FormatError, MissingLeafError, SchemaError
from recollect.testing import SinkContract


def rows(*rewards: float, group: int = 1, n: int = 3) -> list[Any]:
    return [rr.decode(rr.encode([experience(r, n)], group_id=group, run_id=i)) for i, r in enumerate(rewards)]


def batch(*groups: tuple[float, ...]) -> Any:
    return rr.Experiences.concat([x for g, rewards in enumerate(groups) for x in rows(*rewards, group=g)])


lengths = st.tuples(st.integers(0, 5), st.integers(0, 5))


@given(st.lists(st.tuples(lengths, st.floats(width=32, allow_nan=False)), max_size=6), st.integers(0, 2**62))
def test_what_goes_in_comes_out(given_rows: list[Any], group: int) -> None:
    rng = np.random.default_rng(0)
    made = []
    for (prompt, response), reward in given_rows:
        tokens = rng.integers(0, 99, prompt + response, dtype=np.int32)
        mask = rng.integers(0, 2, response).astype(bool)
        made.append(
            rr.Experience(
                tokens=tokens,
                prompt_length=prompt,
                logprobs=rng.random(response, np.float32),
                action_mask=mask,
                reward=reward,
                info={"n": response},
                metrics={"m": float(prompt)},
            )
        )
    x = rr.decode(rr.encode(made, batch_id="b", task_id=4, group_id=group, run_id=2))
    assert len(x) == len(made)
    for i, e in enumerate(made):
        sample = x[i]
        assert np.array_equal(sample["tokens"], e.tokens) and np.array_equal(sample["logprobs"], e.logprobs)
        assert np.array_equal(sample["action_mask"], e.action_mask)
        assert float(sample["reward"]) == pytest.approx(e.reward) and np.isnan(sample["advantage"])
        assert (int(sample["group_id"]), int(sample["run_id"]), int(sample["step"])) == (group, 2, i)
        assert x.info[i] == e.info
    if made:
        assert x.task_of(group) == ("b", 4) and x.ends.sum() == 1
        assert x.metrics["m"].tolist() == [e.metrics["m"] for e in made]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans(), st.booleans()), max_size=4),
    st.sampled_from([None, 3]),
)
def test_values_that_must_be_converted_make_the_same_bytes(shapes: list[Any], run_id: int | None) -> None:
    """Arrays and plain numbers are gathered as they are, lists and numpy's numbers one by one."""
    quick, slow = [], []
    for i, (prompt, response, has_mask, has_step) in enumerate(shapes):
        leaves: dict[str, Any] = {
            "tokens": np.arange(prompt + response, dtype=np.int32),
            "logprobs": np.linspace(0, 1, response, dtype=np.float32),
        }
        leaves |= {"action_mask": np.arange(response) % 2 == 0} if has_mask else {}
        plain = {"prompt_length": prompt, "reward": i / 4, "truncated": has_mask, "model_version": 7 - i}
        plain |= {"step": 5 + i, "run_id": 2} if has_step else {}
        quick.append(rr.Experience(**leaves, **plain))
        plain["reward"] = np.float32(plain["reward"])
        slow.append(rr.Experience(**{k: v.tolist() for k, v in leaves.items()}, **plain))
    assert rr.encode(quick, group_id=9, run_id=run_id) == rr.encode(slow, group_id=9, run_id=run_id)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": np.zeros((2, 2), np.int32)}, "tokens"),
        ({"tokens": np.zeros(3)}, "tokens"),
        (
            {"logprobs": np.zeros(3, np.float32)},
            "logprobs: must have one element per response token, 2, got 3",
        ),
        ({"tokens": np.zeros(4098, np.int32), "logprobs": np.zeros(4097, np.float32)}, "at most 4096"),
        ({"prompt_length": 4}, "prompt_length"),
        ({"prompt_length": True}, "prompt_length"),
        ({"model_version": 2**63}, "model_version"),
        ({"run_id": 2**31}, "run_id"),
        ({"reward": "high"}, "reward"),
        ({"rewards": 1.0}, "rewards: must be a leaf"),
    ],
)
def test_a_value_off_the_space_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    leaves = {
        "tokens": np.zeros(3, np.int32),
        "logprobs": np.zeros(2, np.float32),
        "prompt_length": 1,
        "reward": 1.0,
    }
    rr.encode(rr.Experience(**leaves))
    with pytest.raises(SchemaError, match=said):
        rr.encode(rr.Experience(**(leaves | change)))


def test_parts_are_joined_behind_their_lead_and_summed() -> None:
    rng = np.random.default_rng(0)
    parts: list[Any] = [
        rng.bytes(3),
        rng.random((7, 3)),
        b"",
        rng.bytes(100_000),
        np.zeros(0),
        rng.bytes(8064),
    ]
    found = _core.join_summed(b"lead....more", parts, 4)
    body = b"".join(parts)
    assert found == b"lead" + _core.crc32c_portable(body).to_bytes(4, "little") + b"more" + body
    for lead, given_parts, at in (
        (b"lead", [np.zeros((4, 4))[:, 1]], 0),
        (b"lead", ["text"], 0),
        (b"lead", [], 1),
    ):
        with pytest.raises((TypeError, ValueError)):
            _core.join_summed(lead, given_parts, at)


@given(st.data())
def test_damage_is_seen(data: Any) -> None:
    """No changed byte and no cut reaches the rows: padding aside, everything is under a checksum."""
    payload = rr.encode([experience(), experience(0.5, 7)], group_id=3, run_id=1)
    if data.draw(st.booleans(), label="cut"):
        broken = payload[: data.draw(st.integers(0, len(payload) - 1), label="at")]
        with pytest.raises(FormatError):
            rr.decode(broken)
        return
    at = data.draw(st.integers(0, len(payload) - 1), label="at")
    broken = (
        payload[:at] + bytes([payload[at] ^ data.draw(st.integers(1, 255), label="flip")]) + payload[at + 1 :]
    )
    try:
        x = rr.decode(broken)
    except FormatError:
        return
    assert np.array_equal(x.rows.tobytes(), rr.decode(payload).rows.tobytes())


@pytest.mark.parametrize(
    ("leaves", "error", "text"),
    [
        ({"tokens": [1.5, 2.5]}, SchemaError, "tokens"),
        ({"logprobs": [0.0]}, SchemaError, "logprobs"),
        ({"prompt_length": 9}, SchemaError, "prompt_length"),
        ({"reward": "high"}, SchemaError, "reward"),
        ({"reward": 1e300}, SchemaError, "reward"),
        ({"colour": 1}, SchemaError, "colour"),
        ({"tokens": list(range(5000)), "logprobs": [0.0] * 4999}, SchemaError, "4096"),
        ({"tokens": None}, MissingLeafError, "tokens"),
        ({"info": {"x": "y" * 70_000}}, SchemaError, "65536"),
    ],
)
def test_what_is_off_the_space_is_named(leaves: dict[str, Any], error: type[Exception], text: str) -> None:
    good = {"tokens": [1, 2, 3], "prompt_length": 1, "logprobs": [0.0, 0.0], "reward": 1.0}
    with pytest.raises(error, match=text):
        rr.encode([rr.Experience(**good | leaves)])


def test_step_experience_with_extra_leaves() -> None:
    space = rr.experience_space(
        "step", obs=((3,), "float32"), action=((), "int64"), extra={"note": ((2,), "uint8")}
    )
    steps = [
        rr.Experience(obs=np.full(3, i, np.float32), action=i, reward=1.0, note=np.array([i, 7], np.uint8))
        for i in range(3)
    ]
    x = rr.decode(rr.encode(steps, space=space, group_id=1, run_id=0))
    assert x.obs[2].tolist() == [2.0] * 3 and x.action.tolist() == [0, 1, 2] and x.note[1].tolist() == [1, 7]
    assert x.step.tolist() == [0, 1, 2] and x.get_segments() == [(0, 3)]


def test_views_and_columns() -> None:
    x = batch((1.0, 2.0), (3.0,))
    part = x.where(x.reward > 1.5)
    assert part.reward.tolist() == [2.0, 3.0] and part.tokens.offsets.tolist() == [0, 4, 8]
    assert part.padded("tokens").shape == (2, 4) and len(x) == 3
    changed = x.replace(reward=np.zeros(3, np.float32))
    assert changed.reward.tolist() == [0.0] * 3 and x.reward.tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(ValueError):
        x.reward[0] = 5.0
    ids, index = x.groups()
    assert ids.tolist() == [0, 1] and index.tolist() == [0, 0, 1]
    with pytest.raises(rc.ReadOnlyError):
        x.append({})


# -- operators


def test_grpo_is_the_sample_deviation_of_runs_and_drops_small_groups() -> None:
    x, counts = rr.GroupAdvantage()(batch((1.0, 2.0, 3.0), (5.0,), (float("nan"), 1.0, 0.0)))
    assert x.advantage[:3].tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-4)
    assert counts == {"no_reward": 1.0, "small_group": 1.0} and len(x) == 5
    raw, _ = rr.GroupAdvantage(scale=False)(batch((1.0, 2.0, 3.0)))
    assert raw.advantage.tolist() == [-1.0, 0.0, 1.0]


def test_all_steps_of_a_run_get_its_last_rewards_advantage() -> None:
    runs = [
        rr.decode(rr.encode([experience(9.0), experience(last)], group_id=1, run_id=i))
        for i, last in enumerate((0.0, 2.0))
    ]
    x, _ = rr.GroupAdvantage(scale=False)(rr.Experiences.concat(runs))
    assert x.advantage.tolist() == [-1.0, -1.0, 1.0, 1.0]


def test_filters() -> None:
    x = batch((1.0, 1.0), (1.0, 2.0))
    assert len(rr.DropUniformGroups()(x)[0]) == 2
    assert rr.RewardFilter(low=1.5)(x)[0].reward.tolist() == [2.0]
    assert len(rr.LengthFilter(high=2)(x)) == 0 and len(rr.LengthFilter(high=3)(x)) == 4
    assert len(rr.StalenessFilter(1).at(2)(x)) == 0
    shaped, _ = rr.ShapeReward(fn=lambda x: x.reward * 2, clip=(0, 3))(x)
    assert shaped.reward.tolist() == [2.0, 2.0, 2.0, 3.0]


def test_dedupe_remembers_only_what_was_committed() -> None:
    x, once = batch((1.0, 1.0)), rr.Dedupe()
    assert len(once(x)) == 1 and len(once(x)) == 1  # tried again, nothing was delivered
    once.commit()
    assert len(once(x)) == 0
    assert len(rr.Dedupe("uid")(x)) == 2


# -- sinks


class TestFileSink(SinkContract):
    def make_sink(self, tmp_path: Path) -> Any:
        return rr.FileSink(tmp_path / "out", "jsonl")

    def rows_in(self, sink: Any) -> list[Any]:
        lines = [
            json.loads(line) for f in sorted(sink.path.glob("*.jsonl")) for line in f.read_text().splitlines()
        ]
        return [(line["group_id"], line["run_id"], line["step"]) for line in lines]


class TestReplaySink(SinkContract):
    def make_sink(self, tmp_path: Path) -> Any:
        return rr.ReplaySink(rr.experience_buffer("memory", capacity=100, max_tokens=4096), owned=True)

    def rows_in(self, sink: Any) -> list[Any]:
        x = sink.buffer[:]
        return list(zip(x["group_id"].tolist(), x["run_id"].tolist(), x["step"].tolist()))


class TestQueueSink(SinkContract):
    def make_sink(self, tmp_path: Path) -> Any:
        return rr.QueueSink()

    def rows_in(self, sink: Any) -> list[Any]:
        return [uid for part in sink._parts for uid in part.uids.tolist()]


def test_parquet_keeps_ids_and_info(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    payload = rr.encode([experience(info={"a": 1})], batch_id=3, task_id="t", group_id=9, run_id=0)
    rr.FileSink(tmp_path).write(rr.decode(payload), "c-1")
    table = parquet.read_table(tmp_path / "c-1.parquet").to_pydict()
    assert (
        table["batch_id"] == ["3"] and table["task_id"] == ["t"] and json.loads(table["info"][0]) == {"a": 1}
    )
    assert table["tokens"] == [[0, 1, 2, 3]] and [p.name for p in tmp_path.iterdir()] == ["c-1.parquet"]


def test_one_run_is_one_segment_of_the_buffer() -> None:
    async def two_steps(task: Any, models: Any) -> Any:
        return [experience(0.0), experience(1.0)]

    async def main() -> None:
        buf = rr.experience_buffer("memory", capacity=50, max_tokens=16)
        made = rr.Config(space=buf.single_space, sink=buf, operators=("grpo",))
        async with rr.RolloutCoordinator(made, []) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(two_steps, repeat_times=2)], batch_type="train")
            assert (await c.finalize_train_batch(1))["experience_count"] == 4
            assert c.sink is buf
        assert (
            buf.get_segments() == [(0, 2), (2, 4)]
            and len(rc.StepSampler(buf, 3, seed=0).sample()["reward"]) == 3
        )
        buf.close()

    run(main())


def test_the_queue_gives_exactly_n_or_nothing() -> None:
    async def main() -> None:
        sink = rr.QueueSink(4)
        sink.write(batch((1.0, 2.0, 3.0)), "a")
        assert (await sink.get(2)).reward.tolist() == [1.0, 2.0]
        with pytest.raises(DeadlineError, match="2 rows"):
            await sink.get(2, timeout=0)
        assert len(sink) == 1
        full = threading.Thread(target=sink.write, args=(batch((4.0, 5.0, 6.0, 7.0)), "b"))
        full.start()  # waits: 1 + 4 > 4
        first = await sink.get(1)
        more = await sink.get(4, timeout=10)
        full.join(10)
        assert first.reward.tolist() == [3.0] and more.reward.tolist() == [4.0, 5.0, 6.0, 7.0]
        waiting = asyncio.create_task(sink.get(1, timeout=10))
        await asyncio.sleep(0)
        sink.close()
        with pytest.raises(ClosedError):
            await waiting
        with pytest.raises(ClosedError):
            sink.write(batch((1.0,)), "c")

    run(main())


def test_the_queue_drops_what_is_too_old_and_counts_it() -> None:
    async def main() -> None:
        sink = rr.QueueSink()
        for version in (1, 2, 3):
            sink.write(
                rr.decode(rr.encode([experience()], group_id=version, run_id=0, model_version=version)),
                str(version),
            )
        assert (await sink.get(2, min_version=2)).model_version.tolist() == [2, 3]
        assert sink.dropped_stale == 1

    run(main())


@pytest.mark.parametrize(
    ("lengths", "prompt", "said"),
    [
        ((-1, 3, 3), 1, "fit the space"),
        ((5000, 3, 3), 1, "fit the space"),
        ((3, 3, 3), 0, "add up"),
        ((4, 3, 3), 5, "prompt_length"),
        ((4, 3, 3), -1, "prompt_length"),
        ((4, 3, 3), 2, "per response token"),
    ],
)
def test_lengths_that_lie_are_refused_though_the_checksums_hold(
    lengths: tuple[int, ...], prompt: int, said: str
) -> None:
    """As a foreign encoder could write them: tokens, logprobs and mask of one row."""
    from recollect.rollout.frame import aligned, body_of, framed, opened
    from recollect.rollout.schema import plan_of

    plan = plan_of()
    head, body = opened(rr.encode([experience()]))
    rows = np.frombuffer(body, plan.row_dtype, 1).copy()
    rows["prompt_length"] = prompt
    at, sizes = aligned(rows.nbytes) + aligned(12), [rows.nbytes, 12]
    blocks: list[list[Any]] = [[rows], [np.array(lengths, np.int32)]]
    for leaf, count in zip(plan.ragged, head.blocks):
        sizes.append(count * leaf.nbytes)
        blocks.append([bytes(body[at : at + sizes[-1]])])
        at += aligned(sizes[-1])
    with pytest.raises(FormatError, match=said):
        rr.decode(framed(head, *body_of(blocks, sizes)))


def test_a_batch_larger_than_the_queue_enters_an_empty_one_and_only_that() -> None:
    sink = rr.QueueSink(2)
    entered = threading.Event()

    def write(commit_id: str) -> None:
        sink.write(batch((1.0, 2.0, 3.0)), commit_id)
        entered.set()

    first = threading.Thread(target=write, args=("a",), daemon=True)
    first.start()
    assert entered.wait(20) and len(sink) == 3
    entered.clear()
    second = threading.Thread(target=write, args=("b",), daemon=True)
    second.start()
    assert len(run(sink.get(2))) == 2 and not sink.holds("b")  # one is left: it waits for that too
    assert len(run(sink.get(1))) == 1
    assert entered.wait(20) and sink.holds("b")
