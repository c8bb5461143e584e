"""Payloads: experience as bytes and back, damage, and bytes that were made to mislead."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rollout.make import experience

import recollect.rollout as rr
from recollect import _core
from recollect.errors import FormatError, MissingLeafError, SchemaError
from recollect.rollout.experience.payload import decode_many
from recollect.rollout.experience.space import plan_of

lengths = st.tuples(st.integers(0, 5), st.integers(0, 5))


def framed_by(change: Any) -> bytes:
    """A payload whose head was changed, with the right checksums."""
    from recollect.rollout.experience.frame import framed, opened

    head, body = opened(rr.encode([experience(metrics={"m": 1.0})]))
    change(head)
    return framed(head, [bytes(body)], len(body))


@given(st.lists(st.tuples(lengths, st.floats(width=32, allow_nan=False)), max_size=6), st.integers(0, 2**62))
def test_decode_gives_back_what_encode_was_given(given_rows: list[Any], group: int) -> None:
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
def test_a_damaged_payload_is_refused(data: Any) -> None:
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
def test_an_experience_off_its_space_is_refused_with_the_name_of_the_leaf(
    leaves: dict[str, Any], error: type[Exception], text: str
) -> None:
    good = {"tokens": [1, 2, 3], "prompt_length": 1, "logprobs": [0.0, 0.0], "reward": 1.0}
    with pytest.raises(error, match=text):
        rr.encode([rr.Experience(**good | leaves)])


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
def test_lengths_that_do_not_add_up_are_refused_though_the_checksums_hold(
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
    with pytest.raises(
        SchemaError, match="tokens: must have at most 5 elements, got 6; raise max_tokens: Config"
    ):
        rr.encode([experience(n=5, advantages=[0.0] * 5, token_versions=[0] * 5)], space=space)


def test_leaves_left_out_have_their_defaults() -> None:
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
def test_a_head_that_does_not_fit_is_refused_though_the_checksums_hold(
    name: str, value: Any, said: str
) -> None:
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
