"""What an item is, and trajectories: every accepted form comes back as it was given."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from tests.remote.make import MAX_LENGTH, PLAIN, SAMPLE, grid, paths, samples

import recollect as rc
from recollect.errors import SchemaError
from recollect.remote import ReplayBufferManager, Trajectories
from recollect.remote.items.packed import PackedItems, storable
from recollect.remote.items.space import item_space, space_of_text, text_difference

INF = float("inf")


def test_an_environment_is_its_transitions() -> None:
    env = gymnasium.make("CartPole-v1")
    assert item_space(env).space == rc.transition_space(env)
    several = gymnasium.make_vec("CartPole-v1", num_envs=2)
    assert item_space(several).space == rc.transition_space(env)
    several.close()


def test_an_object_with_a_trajectory_space_brings_its_length() -> None:
    class Env:
        trajectory_space = grid()
        max_length = 7

    items = item_space(Env())
    assert items.is_trajectory and items.max_length == 7
    assert item_space(Env(), 3).max_length == 3


def test_a_wrapped_environment_brings_both_too() -> None:
    class Env(gymnasium.Env):
        observation_space = action_space = spaces.Discrete(2)
        trajectory_space = grid()
        max_length = 7

    items = item_space(gymnasium.Wrapper(gymnasium.Wrapper(Env())))
    assert items.is_trajectory and items.max_length == 7 and items.id == item_space(Env()).id


@pytest.mark.parametrize("wrong", [0, -1, True, 2**31])
def test_a_length_must_be_one(wrong: Any) -> None:
    with pytest.raises(ValueError, match="max_length"):
        item_space(grid(), wrong)
    with pytest.raises(ValueError, match="is for trajectories"):
        item_space(PLAIN, 5)
    with pytest.raises(ValueError, match="trajectories need the most steps"):
        item_space(grid())


def test_steps_have_a_fixed_size() -> None:
    step = spaces.Dict({"state": spaces.Discrete(3), "name": spaces.Text(5)})
    with pytest.raises(TypeError, match="steps: leaves must have a fixed size"):
        item_space(spaces.Dict({"steps": spaces.Sequence(step)}), 4)


def test_steps_may_be_given_one_by_one() -> None:
    step = spaces.Dict({"state": spaces.Box(0, 8, (2,), np.int32), "action": spaces.Discrete(3)})
    items = item_space(spaces.Dict({"steps": spaces.Sequence(step)}), 4)
    one, other = ({"state": np.array([i, i], np.int32), "action": i} for i in (1, 2))
    back = items.decode(items.encode({"steps": [[one, other], (other,)]}))
    assert back.lengths.tolist() == [2, 1] and back.steps["action"].tolist() == [1, 2, 2]
    assert back.steps["state"].tolist() == [[1, 1], [2, 2], [2, 2]]
    with pytest.raises(SchemaError, match="at least 1 step"):
        items.encode({"steps": [[one], []]})
    bare = item_space(spaces.Dict({"steps": spaces.Sequence(spaces.Discrete(9))}), 4)
    numbers = bare.decode(bare.encode({"steps": [[3, 4], (5,)]}))
    assert numbers.lengths.tolist() == [2, 1] and numbers.steps.tolist() == [3, 4, 5]


def test_a_log_reward_is_a_scalar_float() -> None:
    for wrong in ((2,), "float32"), ((), "int64"):
        with pytest.raises(ValueError, match="log_reward"):
            item_space({"id": ((), "int64"), "log_reward": wrong})
    assert not item_space({"x": {"log_reward": ((), "float32")}}).has_log_reward


lengths = st.lists(st.integers(1, MAX_LENGTH), max_size=8)


@given(lengths)
def test_trajectories_come_back_from_packed_rows(given_: list[int]) -> None:
    items = item_space(grid(), MAX_LENGTH)
    given_paths = paths(range(len(given_)), np.arange(len(given_), dtype=float), given_)
    packed = items.encode(given_paths)
    back = items.decode(packed)
    assert_equal(back, given_paths)
    assert packed.nbytes == sum(given_) * items.shapes.row_nbytes + len(given_) * (
        4 + items.shapes.field_nbytes
    )
    assert packed.item_nbytes().sum() == packed.nbytes
    block = {"steps": [one["steps"] for one in given_paths], "id": given_paths.fields["id"],
             "final_state": given_paths.fields["final_state"], "log_reward": given_paths.log_rewards}  # fmt: skip
    assert_equal(items.decode(items.encode(block)), given_paths)


def assert_equal(a: Trajectories, b: Trajectories) -> None:
    np.testing.assert_equal(a.lengths, b.lengths)
    np.testing.assert_equal(a.log_rewards, b.log_rewards)
    for mine, theirs in ((a.steps, b.steps), (a.fields, b.fields)):
        assert mine.keys() == theirs.keys()
        for key in mine:
            np.testing.assert_equal(mine[key], theirs[key])


@given(lengths.filter(bool), st.data())
def test_indices_and_takes_choose_whole_trajectories(given_: list[int], data: Any) -> None:
    n = len(given_)
    all_of = paths(range(n), np.zeros(n), given_)
    index = data.draw(st.lists(st.integers(-n, n - 1), max_size=6))
    some = all_of[index]
    assert some.fields["id"].tolist() == [i % n for i in index]
    assert (some.steps["state"][:, 0] == np.repeat(some.fields["id"] % 8, some.lengths)).all()
    items = item_space(grid(), MAX_LENGTH)
    at = np.array([i % n for i in index], np.int64)
    assert_equal(items.decode(items.encode(all_of).take(at)), all_of[at])
    mask = np.arange(n) % 2 == 0
    assert all_of[mask].fields["id"].tolist() == np.flatnonzero(mask).tolist()
    with pytest.raises(IndexError):
        all_of[n]


def test_no_trajectories_are_some_too() -> None:
    none = Trajectories({"x": np.zeros((0, 3))}, [])
    steps, mask = none.to_padded()
    assert len(none) == 0 and steps["x"].shape == (0, 0, 3) and mask.shape == (0, 0)
    assert len(Trajectories.from_padded({"x": np.zeros((0, 4, 3))}, [])) == 0
    assert len(Trajectories.concat([none, none])) == len(none[:]) == 0


def test_leaves_may_be_tuples_and_texts() -> None:
    """A tuple of strings is one leaf, a string for each trajectory."""
    two = Trajectories({"x": (np.arange(3), np.arange(3) * 2)}, [1, 2], name=("a", "b"), goal=(np.arange(2),))
    assert two[1]["name"] == "b" and two[1]["goal"] == (1,) and two[1]["steps"]["x"][1].tolist() == [2, 4]
    turned = Trajectories.concat([two[[1]], two[[0]]])
    assert turned.fields["name"] == ("b", "a") and turned.fields["goal"][0].tolist() == [1, 0]
    assert [leaf.tolist() for leaf in turned.steps["x"]] == [[1, 2, 0], [2, 4, 0]]
    assert two.to_padded()[0]["x"][0].tolist() == [[0, 0], [1, 2]]
    with pytest.raises(SchemaError, match="name: must have 2 rows, got 1"):
        Trajectories({"x": np.zeros(2)}, [1, 1], name=("a",))


@pytest.mark.parametrize("index", [1, slice(1, 2), [1]])
def test_what_is_chosen_is_the_callers_own(index: Any) -> None:
    two = paths([1, 2], [0.0, 1.0], [2, 3])
    kept = Trajectories.concat([two])
    found = two[index]
    for part in (found["steps"], found) if isinstance(found, dict) else (found.steps, found.fields):
        for leaf in part.values():
            if isinstance(leaf, np.ndarray):
                leaf[...] = 0
    assert_equal(two, kept)


@given(lengths.filter(bool), st.integers(0, 3), st.booleans())
def test_padding_goes_on_and_off(given_: list[int], more: int, time_major: bool) -> None:
    n = len(given_)
    first = paths(range(n), np.zeros(n), given_)
    steps, mask = first.to_padded(max(given_) + more)
    assert mask.sum(1).tolist() == given_ and steps["state"].shape == (n, max(given_) + more, 2)
    assert not steps["state"][~mask].any()
    assert first.to_padded()[1].shape == (n, max(given_))
    if time_major:
        steps = {key: np.swapaxes(value, 0, 1) for key, value in steps.items()}
    back = Trajectories.from_padded(steps, given_, time_major, log_rewards=first.log_rewards, **first.fields)
    assert_equal(back, first)
    with pytest.raises(ValueError, match="max_length"):
        first.to_padded(max(given_) - 1)
    assert_equal(Trajectories.concat([first[:1], first[1:]]) if n > 1 else first, first)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda: Trajectories({"x": np.zeros(3)}, [0, 3]), "at least 1"),
        (lambda: Trajectories({"x": np.zeros(3)}, [1, 1]), "x: must have 2 rows, got 3"),
        (lambda: Trajectories({"x": np.zeros(2)}, [1, 1], [0.0]), "log_rewards"),
        (lambda: Trajectories({"x": np.zeros(2)}, [1.0, 1.0]), "integers"),
        (lambda: Trajectories({"x": np.zeros(2)}, [[1], [1]]), "1-D"),
        (lambda: Trajectories({"x": np.zeros(2)}, [1, 1], goal=np.zeros(3)), "goal"),
        (lambda: Trajectories({"x": np.zeros(2)}, [1, 1], [1, 2]), "floats"),
        (lambda: Trajectories({"x": (np.zeros(2), np.zeros(3))}, [1, 1]), "x/1: must have 2 rows, got 3"),
        (lambda: Trajectories({"x": np.zeros(0)}, [2**31, 1]), "^lengths"),
        (lambda: Trajectories.from_padded({"x": np.zeros(2)}, [1, 1]), "room for lengths"),
        (lambda: Trajectories.from_padded({"x": np.zeros((3, 2))}, [1, 1]), "room for lengths"),
        (lambda: Trajectories.from_padded({"x": np.zeros((2, 2))}, [1, 3]), "room for lengths"),
    ],
)
def test_trajectories_that_do_not_fit_are_refused(wrong: Any, text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        wrong()


def test_a_stored_packed_block_is_a_container() -> None:
    m = ReplayBufferManager(grid(), 1, None, max_length=MAX_LENGTH)
    m.add(paths(range(4), np.arange(4.0)))
    other = ReplayBufferManager(grid(), 1, None, max_length=MAX_LENGTH)
    other.add(m.buffer.get_packed_at([1, 3]))
    other.add(m.buffer)
    assert sorted(other.buffer[:]["id"].tolist()) == [0, 1, 1, 2, 3, 3]
    with pytest.raises(SchemaError, match="packed rows"):
        other.add(np.zeros((2, 5), np.uint8))
    block = m.buffer.get_packed_at([1, 3])
    for odd in (np.zeros_like(block), np.ones_like(block)):  # no step, and more than there is room for
        with pytest.raises(SchemaError, match=r"lengths must be in \[1, 12\]"):
            other.add(odd)
    with pytest.raises(SchemaError, match="packed rows"):
        ReplayBufferManager(SAMPLE, 1, None).add(np.zeros((2, 5), np.uint8))


@pytest.mark.parametrize(
    ("env", "length", "given_"),
    [(SAMPLE, None, samples([1, 2], [0.5, 2.0])), (grid(), MAX_LENGTH, paths([1, 2], [0.5, 2.0]))],
)
def test_a_packed_block_is_copied(env: Any, length: int | None, given_: Any) -> None:
    m = ReplayBufferManager(env, 1, None, max_length=length)
    m.add(given_)
    block = m.buffer.get_packed_at([0, 1]).copy()
    packed = item_space(env, length).encode(block)
    before = [part.tobytes() for part in packed.blocks()]
    block[:] = 0
    assert [part.tobytes() for part in packed.blocks()] == before


def test_containers_of_another_kind_are_refused() -> None:
    m = ReplayBufferManager(SAMPLE, 1, None)
    with pytest.raises(SchemaError, match="must be a block"):
        m.add(paths([1], [0.0]))
    trajectories = ReplayBufferManager(grid(), 1, None, max_length=4)
    for wrong in (samples([1], [0.0]), {"steps": []}, 5):
        with pytest.raises((SchemaError, TypeError)):
            trajectories.add(wrong)
    assert len(m.buffer) == len(trajectories.buffer) == 0


def test_a_log_reward_has_one_name() -> None:
    with pytest.raises(ValueError, match="must be given as log_rewards"):
        Trajectories({"x": np.zeros(2)}, [1, 1], log_reward=np.zeros(2))


def test_a_block_of_trajectories_that_does_not_fit_is_refused() -> None:
    items = item_space(grid(), MAX_LENGTH)
    two = paths([1, 2], [0.0, 1.0], [2, 3])
    block = {"steps": [one["steps"] for one in two], **two.fields, "log_reward": two.log_rewards}
    none = {key: leaf[:0] for key, leaf in two[0]["steps"].items()}
    for wrong, text in (
        ({**block, "steps": [none, two[1]["steps"]]}, "at least 1 step"),
        ({**block, "steps": [two[1]["steps"]]}, "length must be 2 as that of the fields, got 1"),
        ({**block, "more": two.log_rewards}, "keys"),
    ):
        with pytest.raises(SchemaError, match=text):
            items.encode(wrong)
    bare = item_space(spaces.Dict({"steps": grid()["steps"]}), MAX_LENGTH)
    with pytest.raises(SchemaError, match="goal: is no field"):
        bare.encode(Trajectories(two.steps, two.lengths, goal=np.zeros(2)))


def test_parts_that_do_not_fit_are_refused() -> None:
    with_rewards = paths([1], [0.0], [2])
    without = Trajectories(with_rewards.steps, with_rewards.lengths, **with_rewards.fields)
    for parts, text in (([], "got none"), ([with_rewards, without], "all have log_rewards or none")):
        with pytest.raises(ValueError, match=text):
            Trajectories.concat(parts)
    assert Trajectories.concat([without, without]).log_rewards is None


def test_parts_join_to_one_container() -> None:
    items = item_space(grid(), MAX_LENGTH)
    parts = [paths([1, 2], [0.0, 1.0], [2, 3]), paths([3], [2.0], [1])]
    whole = items.decode(PackedItems.concat([items.encode(part) for part in parts]))
    assert_equal(whole, Trajectories.concat(parts))


@pytest.mark.parametrize(
    ("env", "length", "given_"),
    [(SAMPLE, None, samples([1, 2, 3], [0.5, -INF, 2.0])), (grid(), 5, paths([1, 2, 3], [0.5, -INF, 2.0]))],
)
def test_items_keep_their_rewards_and_their_purpose(env: Any, length: int | None, given_: Any) -> None:
    whole = item_space(env, length).encode(given_)
    for packed, scoring_only in ((whole, False), (whole.without_steps(), True)):
        some = packed.take(np.array([2, 0]))
        both = PackedItems.concat([some, packed])
        for one, rewards in (
            (packed, [0.5, -INF, 2.0]), (some, [2.0, 0.5]), (both, [2.0, 0.5, 0.5, -INF, 2.0])
        ):  # fmt: skip
            assert one.log_rewards is not None and one.log_rewards.tolist() == rewards
            assert one.scoring_only is scoring_only and one.n == len(rewards) == len(one.item_nbytes())
            assert one.item_nbytes().sum() == one.nbytes
    only = whole.without_steps()
    assert len(only.rows) == (0 if length else 3) and only.rows_crc is None is not whole.rows_crc


def test_an_item_that_may_not_be_stored_has_one_reason() -> None:
    packed = item_space(grid(), 5).encode(paths(range(5), [0.0, np.nan, 0.0, INF, -INF], [2, 2, 6, 6, 5]))
    reasons: list[tuple[str, int]] = []
    allowed = storable(packed, 5, lambda reason, n: reasons.append((reason, n)))
    assert allowed is not None and allowed.tolist() == [True, False, False, False, True]
    assert reasons == [("bad_value", 2), ("too_long", 1)]


# -- spaces that a peer described


@pytest.mark.parametrize(
    ("mine", "theirs", "leaf"),
    [
        (PLAIN, SAMPLE, "log_reward: only at the worker"),
        (SAMPLE, PLAIN, "log_reward: only at the manager"),
        ({"a": {"b": ((2,), "int64")}}, {"a": {"b": ((3,), "int64")}}, "a/b"),
        ({"a": ((), "int64"), "b": ((), "int64")}, {"b": ((), "int64"), "a": ((), "int64")}, "order"),
        (grid(), grid(np.float32), "log_reward"),
    ],
)
def test_the_first_difference_is_named(mine: Any, theirs: Any, leaf: str) -> None:
    texts = [item_space(space, needs_length=False).text for space in (mine, theirs)]
    assert leaf in (text_difference(*texts) or "") and text_difference(texts[0], texts[0]) is None


@given(st.sampled_from([SAMPLE, PLAIN, {"x": spaces.Discrete(5), "y": ((3,), "float32")}]))
def test_a_described_space_comes_back(space: Any) -> None:
    made = item_space(space)
    assert item_space(space_of_text(made.text)).id == made.id


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"type": "os.system"}', "[" * 10_000, '{"type":"box","dtype":"float32","shape":[4294967296,8]}',
     '{"type":"multibinary","n":1099511627776}'],
)  # fmt: skip
def test_a_described_space_beyond_reason_is_refused(text: str) -> None:
    with pytest.raises(SchemaError):
        space_of_text(text)


@pytest.mark.parametrize(
    "leaf",
    [
        '{"type":"box","dtype":"float32","shape":[134217728,2]}',
        '{"type":"multibinary","n":[134217728,2]}',
        '{"type":"multibinary","n":134217729}',
    ],
)
def test_the_size_of_a_described_leaf_is_looked_at_first(leaf: str) -> None:
    with pytest.raises(SchemaError, match="must have at most 1073741824 bytes"):
        space_of_text(f'{{"type":"dict","items":[["x",{leaf}]]}}')
