"""Experience to bytes and back, operators on it, and the sinks it goes to."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rollout.make import experience, run

import recollect as rc
import recollect.rollout as rr
from recollect import _core
from recollect.errors import ClosedError, DeadlineError, FormatError, MissingLeafError, SchemaError
from recollect.rollout.experience.payload import decode_many
from recollect.rollout.experience.space import plan_of
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
        ({"logprobs": None}, MissingLeafError, "^logprobs: must be given"),
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
        return run(sink.get(len(sink))).uids.tolist() if len(sink) else []


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
    from recollect.rollout.experience.frame import aligned, body_of, framed, opened

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


# -- the space


def dtypes(space: Any) -> dict[str, Any]:
    """By leaf, the dtype; of a Sequence in brackets."""
    found: dict[str, Any] = {}
    for name, leaf in space.spaces.items():
        inner = getattr(leaf, "feature_space", None)
        found[name] = str(leaf.dtype) if inner is None else [str(inner.dtype)]
    return found


TAIL = {
    "reward": "float32", "advantage": "float32", "truncated": "bool", "group_id": "int64", "run_id": "int32",
    "step": "int32", "model_version": "int64", "version_drift": "int32",
}  # fmt: skip


def test_leaves_and_dtypes_are_those_of_the_contract() -> None:
    token = {"tokens": ["int32"], "prompt_length": "int32", "logprobs": ["float32"], "action_mask": ["bool"]}
    assert dtypes(rr.experience_space()) == token | TAIL
    more = rr.experience_space(leaves=("token_versions", "advantages"), extra={"note": ((2,), "uint8")})
    optional = {"token_versions": ["int64"], "advantages": ["float32"]}
    assert dtypes(more) == token | optional | TAIL | {"note": "uint8"}
    step = rr.experience_space("step", obs=((3,), "float32"), action=((), "int64"))
    assert dtypes(step) == {"obs": "float32", "action": "int64", "terminated": "bool"} | TAIL
    assert rr.experience_space().max_tokens == 4096


@pytest.mark.parametrize(
    ("given_fields", "said"),
    [
        ({"kind": "tokens"}, "^kind: "),
        ({"kind": "step"}, "^obs, action: "),
        ({"kind": "step", "obs": ((), "float32")}, "^obs, action: "),
        ({"leaves": ("logprobs",)}, "^leaves: "),
        (
            {"kind": "step", "obs": ((), "float32"), "action": ((), "int64"), "leaves": ("advantages",)},
            "^leaves",
        ),
        ({"extra": {"reward": ((), "float32")}}, "^extra: .*'reward'"),
        ({"max_tokens": 0}, "^max_tokens: "),
        ({"max_tokens": 1.5}, "^max_tokens: "),
    ],
)
def test_a_space_that_makes_no_sense_is_refused(given_fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rr.experience_space(**given_fields)


def test_a_space_that_cannot_hold_experience_is_refused() -> None:
    from gymnasium import spaces

    for wrong in (spaces.Discrete(3), spaces.Dict({"reward": spaces.Box(0, 1)})):
        with pytest.raises(TypeError, match="^space: must"):
            rr.encode([experience()], space=wrong)


def test_optional_leaves_are_per_response_token_and_bounded_like_it() -> None:
    space = rr.experience_space(leaves=("advantages", "token_versions"), max_tokens=5)
    optional = {"advantages": [0.5, 0.25, 0.0], "token_versions": [7, 8, 8]}
    x = rr.decode(rr.encode([experience(**optional)], space=space))
    assert x.advantages.values.tolist() == optional["advantages"] and x.token_versions.values.tolist() == [
        7, 8, 8,
    ]  # fmt: skip
    for name in optional:
        with pytest.raises(SchemaError, match=f"^{name}: must have one element per response token, 3, got 2"):
            rr.encode([experience(**optional | {name: [1, 2]})], space=space)
    rr.encode([experience(n=4, advantages=[0.0] * 4, token_versions=[0] * 4)], space=space)
    with pytest.raises(SchemaError, match="tokens: must have at most 5 elements, got 6; raise max_tokens"):
        rr.encode([experience(n=5, advantages=[0.0] * 5, token_versions=[0] * 5)], space=space)


def test_what_is_left_out_is_not_known_and_the_model_acted_everywhere() -> None:
    row = rr.Experience(tokens=[1, 2, 3], prompt_length=1, logprobs=[-1.0, -1.0])
    for made in (row, rr.Experience(**row.leaves | {"tokens": np.array([1, 2, 3], np.int32)})):
        [sample] = rr.decode(rr.encode([made]))
        assert np.isnan(sample["reward"]) and np.isnan(sample["advantage"]) and not sample["truncated"]
        assert sample["action_mask"].tolist() == [True, True]
        ids = ("group_id", "run_id", "step", "model_version", "version_drift")
        assert [int(sample[name]) for name in ids] == [0] * 5


def test_ids_given_to_encode_win_and_versions_of_the_row_do() -> None:
    row = experience(run_id=5, group_id=6, model_version=7, version_drift=8)
    for made in (row, experience(np.float64(1.0), run_id=5, group_id=6, model_version=7, version_drift=8)):
        x = rr.decode(
            rr.encode([made, made], group_id=1, run_id=2, model_version=3, version_drift=4, attempt=9)
        )
        assert (x.group_id.tolist(), x.run_id.tolist(), x.step.tolist()) == ([1, 1], [2, 2], [0, 1])
        assert (x.model_version.tolist(), x.version_drift.tolist()) == ([7, 7], [8, 8])
    from recollect.rollout.experience.frame import opened

    head, _ = opened(rr.encode([row], batch_id="b", task_id=3, group_id=1, run_id=2, attempt=9))
    assert (head.batch_id, head.task_id, head.group_id, head.attempt, head.run_ids, head.n) == (
        "b",
        3,
        1,
        9,
        [2],
        1,
    )
    assert opened(rr.encode([row, experience(run_id=3)]))[0].run_ids == [3, 5]


def test_info_and_metrics_are_kept_and_checked() -> None:
    row = experience(info={"a": [1, None, "x"]}, metrics={"m": 2, "text": "no"})
    x = rr.decode(rr.encode([row, experience()]))
    assert x.info == ({"a": [1, None, "x"]}, {}) and x.metrics.keys() == {"m"}
    assert x.metrics["m"][0] == 2.0 and np.isnan(x.metrics["m"][1])
    with pytest.raises(SchemaError, match="^info: must be JSON-like"):
        rr.encode([experience(info={"a": object()})])
    with pytest.raises(SchemaError, match="must be an Experience, got int"):
        rr.encode([5])  # type: ignore[list-item]
    assert rr.decode(rr.encode(row)).info == ({"a": [1, None, "x"]},)  # one alone is a batch of one


def test_an_experience_is_pickled_whole() -> None:
    import pickle

    again = pickle.loads(pickle.dumps(experience(info={"a": 1}, metrics={"m": 2.0})))
    assert (again.info, again.metrics, again.reward) == ({"a": 1}, {"m": 2.0}, 1.0)
    with pytest.raises(AttributeError, match="has no leaf 'colour'"):
        again.colour


# -- batches of it


def mixed() -> Any:
    """Three rows of different lengths, the second without a metric."""
    made = [
        experience(float(i), n=i + 1, info={"i": i}, metrics={} if i == 1 else {"m": float(i)})
        for i in range(3)
    ]
    return rr.decode(rr.encode(made, batch_id=1, task_id="t", group_id=4, run_id=0))


def test_part_of_a_batch_keeps_what_belongs_to_its_rows() -> None:
    x = mixed()
    part = x.where([2, 0])
    assert part.info == ({"i": 2}, {"i": 0}) and part.metrics["m"].tolist() == [2.0, 0.0]
    assert part.tokens.values.tolist() == [0, 1, 2, 3, 0, 1] and part.response_length.tolist() == [3, 1]
    assert part.padded("tokens", fill=-1).tolist() == [[0, 1, 2, 3], [0, 1, -1, -1]]
    assert part.task_of(4) == (1, "t") and x.reward.tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(KeyError, match="must be a Sequence leaf"):
        x.padded("reward")
    with pytest.raises(AttributeError, match="has no leaf 'colour'"):
        x.colour


def test_values_that_replace_others_are_checked_and_the_batch_stays() -> None:
    x = mixed()
    other = x.replace(reward=5.0, logprobs=x.logprobs.values * 2)
    assert other.reward.tolist() == [5.0] * 3 and x.reward.tolist() == [0.0, 1.0, 2.0]
    assert set(other.logprobs.values.tolist()) == {-1.0} and set(x.logprobs.values.tolist()) == {-0.5}
    assert other.logprobs.offsets.tolist() == x.logprobs.offsets.tolist()
    for leaves, text in (
        ({"reward": np.zeros(2)}, "^reward: shape must be"),
        ({"run_id": np.zeros(3)}, "^run_id: dtype must be int32"),
        ({"logprobs": np.zeros(2, np.float32)}, "^logprobs: must keep its shape"),
        ({"colour": 1}, "^colour: must be a leaf"),
    ):
        with pytest.raises(SchemaError, match=text):
            x.replace(**leaves)


def test_what_is_taken_out_of_a_batch_is_a_copy_and_its_columns_are_views() -> None:
    payload = rr.encode([experience()])
    x = rr.decode(payload)
    x[0]["tokens"][0] = 99
    x[:]["tokens"][0][0] = 99
    assert x.tokens.values[0] == 0
    for column in (x.rows, x.tokens.values):
        assert not column.flags.owndata and not column.flags.writeable  # views of the bytes they came in


def test_groups_and_runs_are_told_apart() -> None:
    x = batch((1.0, 2.0), (3.0, 4.0))
    assert x.ends.tolist() == [True] * 4 and x.get_segments() == [(0, 1), (1, 2), (2, 3), (3, 4)]
    same_run = rr.Experiences.concat([rows(1.0, group=1)[0], rows(1.0, group=2)[0]])
    assert same_run.ends.tolist() == [True, True]
    ids, index = x.groups()
    assert ids.tolist() == [0, 1] and index.tolist() == [0, 0, 1, 1]


# -- payloads that were not made here


def framed_by(change: Any) -> bytes:
    """A payload whose head was changed, with the right checksums."""
    from recollect.rollout.experience.frame import framed, opened

    head, body = opened(rr.encode([experience(metrics={"m": 1.0})]))
    change(head)
    return framed(head, [bytes(body)], len(body))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("layout", "0" * 32, "layout must be that of the space"),
        ("blocks", [4, 3], "must have 3 blocks, got 2"),
        ("blocks", [-4, 3, 3], "must have 3 blocks"),
        ("blocks", [4, 3, 300], "must fill its"),
        ("n", 2, "metrics and info must be of n rows"),
        ("n", -1, "metrics and info must be of n rows"),
        ("info", [{}, {}], "metrics and info must be of n rows"),
        ("run_ids", "x", "head must be that of an experience"),
        ("info", [{"a": msgspec.Raw(b"\xa1\xff")}], "head must be that of an experience"),  # no UTF-8
        ("info", [{"a": msgspec.Raw(b"\x91" * 2000 + b"\x90")}], "head must be that of an experience"),
    ],
)
def test_a_head_that_lies_is_refused_though_the_checksums_hold(name: str, value: Any, said: str) -> None:
    with pytest.raises(FormatError, match=said):
        rr.decode(framed_by(lambda head: setattr(head, name, value)))


def test_blocks_without_rows_are_refused() -> None:
    from recollect.rollout.experience.frame import aligned, body_of, framed, opened

    head, _ = opened(rr.encode([]))
    assert len(rr.decode(rr.encode([]))) == 0
    head.blocks = [16, 0, 0]
    assert aligned(64) == 64
    with pytest.raises(FormatError, match="blocks must be empty without rows"):
        rr.decode(framed(head, *body_of([[b""], [b""], [bytes(64)]], [0, 0, 64])))


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (0, b"RCXQ", "must begin with b'RCXP'"),
        (4, b"\x02\x00", "version must be 1, got 2"),
        (24, b"\0\0\0\0", "body"),
    ],
)
def test_a_payload_of_something_else_says_so(at: int, value: bytes, said: str) -> None:
    payload = rr.encode([experience()])
    assert payload[:6] == b"RCXP\x01\x00"
    with pytest.raises(FormatError, match=said):
        rr.decode(payload[:at] + value + payload[at + len(value) :])
    with pytest.raises(FormatError, match="at least 32 bytes"):
        rr.decode(payload[:31])
    for wrong in (payload[:-1], payload + b"\0"):  # its size is looked at before anything is summed
        with pytest.raises(
            FormatError, match=f"must have {len(payload)} bytes by its prefix, got {len(wrong)}"
        ):
            rr.decode(wrong)


def test_a_space_is_asked_for_by_its_hash() -> None:
    payload = rr.encode([experience()], space=rr.experience_space(max_tokens=77))
    assert len(rr.decode(payload)) == 1  # this process has met it
    with pytest.raises(FormatError, match="layout must be that of the space"):
        rr.decode(payload, space=rr.experience_space())
    with pytest.raises(FormatError, match="layout must be that of the space"):
        decode_many([rr.encode([experience()]), payload], plan_of())
