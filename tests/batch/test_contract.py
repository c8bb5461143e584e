"""Every batch of the package keeps the contract of BatchBase."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from tests.batch.make import SPACE, batch, numbers, sample

import recollect as rc
from recollect.batch import (
    BatchBase,
    CastTransformation,
    CombinedBatch,
    FrameStackedBatch,
    NStepBatch,
    SliceStackedBatch,
    SubIndexedBatch,
    SubItemBatch,
    ToBackendOrDeviceBatch,
    TransformedBatch,
)
from recollect.batch.structure import leaf_paths, pick
from recollect.replay import ReplayBuffer
from recollect.sampling import PrioritizedSampler, StepSampler
from recollect.testing.batch_contract import BatchContract, Make, equal
from recollect.testing.batches import ListBatch


def labelled(n: int, **kwargs: Any) -> ListBatch:
    metadata = [{"weight": np.float32(i), "name": i} for i in range(n)]
    space = {"weight": ((), "float32"), "name": ((), "int64")}
    return batch(n, metadata=metadata, metadata_space=space, **kwargs)


class Handed(ListBatch):
    """Remembers what its last read returned."""

    last: Any = None

    def get_at(self, idx: Any) -> Any:
        self.last = super().get_at(idx)
        return self.last


ADD_NO_COPY: dict[str, Any] = {
    "slice": lambda b: b.get_slice([2, 0, 1]),
    "live": lambda b: b.get_slice(...),
    "column": lambda b: b.get_column(["obs", "pos"]),
    "same backend": ToBackendOrDeviceBatch,
    "sampler": lambda b: StepSampler(b, 2, seed=0),
}


@pytest.mark.parametrize("name", ADD_NO_COPY)
def test_a_read_through_a_view_is_the_one_copy_of_its_source(name: str) -> None:
    source = Handed(SPACE, [sample(i) for i in range(3)])
    view = ADD_NO_COPY[name](source)
    reads = [lambda: view[[0, 1]], lambda: view.get_at_with_metadata([0, 1])[0], lambda: view[1]]
    for read in [*reads, view.sample] if name == "sampler" else reads:
        found = read()
        pos, given = found if name == "column" else found["obs"]["pos"], source.last["obs"]["pos"]
        assert np.shares_memory(pos, given)


class TestListBatch(BatchContract):
    @pytest.fixture(params=[None, [], "two"])
    def make_batch(self, request: pytest.FixtureRequest) -> Make:
        def make(n: int) -> BatchBase:
            segments = [(0, n // 2), (n // 2, n)] if request.param == "two" and n > 1 else request.param
            return batch(n, segments=[] if segments == "two" else segments)

        return make


class TestListBatchWithMetadata(BatchContract):
    @pytest.fixture
    def make_batch(self) -> Make:
        return labelled


class TestListBatchOfText(BatchContract):
    @pytest.fixture
    def make_batch(self) -> Make:
        space = spaces.Dict(
            {"text": spaces.Text(4), "tokens": spaces.Sequence(spaces.Discrete(9)), "k": spaces.Discrete(9)}
        )
        rows = [{"text": f"t{i}", "tokens": (np.int64(i),) * (i % 3), "k": i} for i in range(9)]
        return lambda n: ListBatch(space, rows[:n], max_lengths={"tokens": 4})


class OnlyFlat(BatchBase):
    """The least that a subclass must give: a length and flattened reads."""

    def __init__(self, n: int) -> None:
        super().__init__(SPACE)
        self.rows = batch(n).get_flattened_at(slice(None))

    def __len__(self) -> int:
        return len(self.rows)

    def get_flattened_at(self, idx: Any) -> Any:
        from recollect.indexing import normalize

        return self.rows[normalize(idx, len(self))].copy()


class TestOnlyFlat(BatchContract):
    @pytest.fixture
    def make_batch(self) -> Make:
        return OnlyFlat


class FlatWrites(OnlyFlat):
    """Flattened writers only; the structured ones are derived."""

    def append_flattened(self, value: Any) -> None:
        self.extend_flattened(np.asarray(value)[None])

    def extend_flattened(self, value: Any) -> None:
        self.rows = np.concatenate([self.rows, value])

    def set_flattened_at(self, idx: Any, value: Any) -> None:
        from recollect.errors import SchemaError
        from recollect.indexing import normalize

        at = normalize(idx, len(self))
        if not isinstance(at, int) and len(at) != len(value):
            raise SchemaError("value: must be as long as the index")
        self.rows[at] = value


class TestFlatWrites(BatchContract):
    can_remove = False

    @pytest.fixture
    def make_batch(self) -> Make:
        return FlatWrites


class TestFrozenSubIndex(BatchContract):
    can_append = can_remove = False

    @pytest.fixture
    def make_batch(self) -> Make:
        return lambda n: SubIndexedBatch(
            labelled(2 * n + 1, segments=[(0, n), (n, 2 * n)]), list(range(2 * n, 0, -2))
        )


class TestLiveSubIndex(BatchContract):
    @pytest.fixture
    def make_batch(self) -> Make:
        return lambda n: SubIndexedBatch(batch(n, segments=[]), ...)


class TestSubItem(BatchContract):
    @pytest.fixture
    def make_batch(self) -> Make:
        return lambda n: SubItemBatch(labelled(n), ("obs", "pos"))


class TestNestedSubItem(BatchContract):
    @pytest.fixture
    def make_batch(self) -> Make:
        return lambda n: SubItemBatch(SubItemBatch(batch(n), "obs"), "pos")


class TestTransformedWithInverse(BatchContract):
    @pytest.fixture
    def make_batch(self) -> Make:
        return lambda n: TransformedBatch(labelled(n), CastTransformation({"obs/image": "float32"}))


class TestTransformedByFunction(BatchContract):
    can_append = can_set = False

    @pytest.fixture
    def make_batch(self) -> Make:
        return lambda n: TransformedBatch(batch(n), lambda b: {"double": b["id"] * 2, "pos": b["obs"]["pos"]})


class TestToTorch(BatchContract):
    @pytest.fixture
    def make_batch(self) -> Make:
        pytest.importorskip("torch")
        return lambda n: ToBackendOrDeviceBatch(labelled(n), "torch", "cpu")


class TestToJax(BatchContract):
    @pytest.fixture
    def make_batch(self) -> Make:
        pytest.importorskip("jax")
        space = {"x": ((2,), "float32"), "k": ((), "int16")}
        rows = [{"x": np.full(2, i, np.float32), "k": np.int16(i)} for i in range(20)]
        return lambda n: ToBackendOrDeviceBatch(ListBatch(space, rows[:n]), "jax")


class TestToBackendUnchanged(BatchContract):
    @pytest.fixture
    def make_batch(self) -> Make:
        return lambda n: ToBackendOrDeviceBatch(batch(n))


class TestCombined(BatchContract):
    @pytest.fixture(params=[False, True])
    def make_batch(self, request: pytest.FixtureRequest) -> Make:
        def make(n: int) -> BatchBase:
            a, b = n // 2, n - n // 2
            parts = [batch(a), batch(0), batch(b, start=100, segments=[(0, b)] if b else [])]
            return CombinedBatch(parts, use_thread_pool=request.param)

        return make


class TestCombinedWithMetadata(BatchContract):
    @pytest.fixture
    def make_batch(self) -> Make:
        return lambda n: CombinedBatch([labelled(0), labelled(n)])


class TestCombinedTorch(BatchContract):
    @pytest.fixture
    def make_batch(self) -> Make:
        pytest.importorskip("torch")

        def make(n: int) -> BatchBase:
            parts = [batch(n // 2), batch(n - n // 2, start=50)]
            return CombinedBatch([ToBackendOrDeviceBatch(part, "torch") for part in parts])

        return make


class StackContract(BatchContract):
    """Stacks are flattened frame by frame, `(T, D)`; the rest is as for every batch."""

    def test_flattened_reads_are_the_same_samples(self, batch: BatchBase) -> None:
        source = batch.get_flattened_at(slice(None))
        assert source.ndim == 3
        assert equal(batch.get_flattened_at([3, 0]), source[[3, 0]])
        assert equal(batch.get_flattened_at(-1), source[-1])
        assert tuple(batch.get_flattened_at([]).shape) == (0, *source.shape[1:])
        first = leaf_paths(batch.single_space)[0][0]
        frames = pick(batch[:], first)
        width = int(np.prod(frames.shape[2:]))
        assert np.array_equal(source[..., :width], frames.reshape(*frames.shape[:2], width))


class TestSliceStack(StackContract):
    @pytest.fixture(params=[(True, False), (True, True), (False, True)])
    def make_batch(self, request: pytest.FixtureRequest) -> Make:
        fill, stack_metadata = request.param

        def make(n: int) -> BatchBase:
            source = labelled(n, segments=[(0, n // 2), (n // 2, n)] if n > 1 else [])
            return SliceStackedBatch(
                source, [-3, 0, 1], fill_invalid_data=fill, stack_metadata=stack_metadata
            )

        return make


class TestStackOfText(BatchContract):
    @pytest.fixture
    def make_batch(self) -> Make:
        space = spaces.Dict({"text": spaces.Text(4), "k": spaces.Discrete(9)})
        rows = [{"text": f"t{i}", "k": i} for i in range(9)]
        return lambda n: FrameStackedBatch(ListBatch(space, rows[:n]), 1, 1)


class TestStackByFunction(StackContract):
    @pytest.fixture
    def make_batch(self) -> Make:
        def same_parity(stack: Any, index: Any, data: Any, metadata: Any) -> Any:
            return data["id"] % 2 == data["id"][:, stack.anchor : stack.anchor + 1] % 2

        return lambda n: FrameStackedBatch(batch(n), 2, 0, same_parity)


class TestStackByEpisodeKey(StackContract):
    @pytest.fixture
    def make_batch(self) -> Make:
        mask = SliceStackedBatch.get_valid_mask_function_with_episode_end_key("id")
        return lambda n: FrameStackedBatch(batch(n), 2, 1, mask)


class TestStackOverTorch(StackContract):
    @pytest.fixture
    def make_batch(self) -> Make:
        pytest.importorskip("torch")
        return lambda n: FrameStackedBatch(ToBackendOrDeviceBatch(batch(n), "torch"), 1)


class TestColumnOfStack(StackContract):
    @pytest.fixture
    def make_batch(self) -> Make:
        return lambda n: FrameStackedBatch(batch(n), 2).get_column("obs")


def transitions(n: int) -> ReplayBuffer:
    """A tracked ring of n samples in segments of three, which has gone round once."""
    number = ((), "float32")
    space = {"obs": number, "next_obs": number, "reward": number, "terminated": ((), "bool")}
    made = ReplayBuffer.create("memory", space, capacity=max(n, 1), maintain_segment_metadata=True)
    for t in range(2 * n):
        one = np.float32(t)
        made.append({"obs": one, "next_obs": one + 1, "reward": one, "terminated": t % 3 == 2})
        if t % 3 == 2:
            made.mark_segment_end()
    return made


class TestNStep(BatchContract):
    @pytest.fixture
    def make_batch(self) -> Make:
        return lambda n: NStepBatch(transitions(n), 2, 0.5)


class SamplerContract(BatchContract):
    """A sampler is a batch too, but for `iter`, which is an epoch."""

    def test_iteration_gives_the_samples_in_order(self, batch: BatchBase) -> None:
        """A sampler iterates by epochs; see tests/sampling."""

    def test_an_empty_batch(self, make_batch: Make) -> None:
        assert list(make_batch(0)) == []

    def test_samples_are_in_the_space(self, batch: BatchBase) -> None:
        assert all(batch.single_space.contains(batch[i]) for i in range(len(batch)))


class TestStepSampler(SamplerContract):
    @pytest.fixture
    def make_batch(self) -> Make:
        return lambda n: StepSampler(batch(n), 3, seed=0)


class TestPrioritizedSampler(SamplerContract):
    @pytest.fixture
    def make_batch(self) -> Make:
        return lambda n: PrioritizedSampler(transitions(n), 3, seed=0)


@pytest.mark.parametrize(
    "view",
    [
        SubIndexedBatch(batch(9), [4, 2, 1]),
        batch(9).get_column("obs"),
        TransformedBatch(batch(9), CastTransformation({"obs/image": "float32"})),
        CombinedBatch([batch(2), batch(2)]),
        FrameStackedBatch(batch(9), 1),
        StepSampler(batch(9), 2),
    ],
    ids=lambda view: type(view).__name__,
)
def test_reads_fill_the_callers_arrays(view: Any) -> None:
    for index in ([2, 0], 1):
        out, wrong = view.get_at([0, 1] if index != 1 else 0), view.get_at([0])
        assert view.get_at(index, out=out) is out
        assert equal(out, view.get_at(index))
        with pytest.raises(rc.SchemaError, match="out must be"):
            view.get_at(index, out=wrong)


def test_the_contract_asks_for_a_batch(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from recollect.testing.batch_contract import BatchContract

        class TestNothing(BatchContract):
            pass
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", "test_remove_at")
    result.assert_outcomes(errors=1)


def test_samples_made_for_the_tests_differ() -> None:
    assert len({str(sample(i)) for i in range(50)}) == 50
    assert numbers(3)[:].tolist() == [0, 1, 2]
