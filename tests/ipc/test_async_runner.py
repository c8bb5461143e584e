"""AsyncRunner: collectors start, work, die, hang, come back, and never stay behind."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any, cast

import gymnasium
import numpy as np
import pytest
from tests.ipc import crews
from tests.ipc.crews import Say, is_gone, runner, sleeps_in, wait_until
from tests.timing import Stopwatch

import recollect as rc
from recollect.ipc.async_runner import lane_seed
from recollect.ipc.runner import collector as collector_module
from recollect.ipc.runner import control as control_module
from recollect.ipc.runner import processes as crew
from recollect.ipc.runner.control import Control, Counters, Permit
from recollect.memory.ring import Ring
from recollect.sampling.stream import mix

pytestmark = [pytest.mark.process, pytest.mark.timeout(90)]


def look(it: rc.ipc.AsyncRunner, timeout_s: float = 200.0) -> None:
    """Look after collectors until that raises."""
    wait_until(lambda: False, timeout_s, it.check_collectors)


def wait_for_signs_of_life(it: rc.ipc.AsyncRunner) -> None:
    """Wait until collector 0 has shown again, and once more, that it is not stuck."""
    words = it._crew.control  # type: ignore[union-attr]
    for _ in range(2):
        before = words.times_ns(0)
        wait_until(lambda before=before: words.times_ns(0) > before, 60.0)  # type: ignore[misc]


def replace_words(control: Control, **instead: Any) -> None:
    """Have some calls of a control's shared words answered by the test."""
    names = ("load", "store", "add", "wake", "wait")
    calls = {name: getattr(control._words, name) for name in names} | instead
    control._words = cast(Any, SimpleNamespace(**calls))


class TestStarting:
    def test_each_collector_knows_who_it_is_and_leads_a_group(self) -> None:
        with runner(num_envs=6, num_collectors=2, seed=5) as it:
            say = it.own(Say.create(2))
            it.start_collectors(crews.tell_who, {"say": say})
            said: dict[int, list[int]] = {0: [], 1: []}
            while sum(map(len, said.values())) < 10:
                taken = say.ring.take(40.0)
                said[taken.lane].append(taken.info[0])
                say.ring.release()
            for lane, (said_lane, num_envs, seed, pid, group) in said.items():
                assert (said_lane, num_envs, seed) == (lane, 3, lane_seed(5, lane, 0))
                assert pid == group != os.getpid()
            wait_until(lambda: it.stats().alive == 0, 20, it.check_collectors)  # to return is not to die
            assert (it.stats().deaths, it.stats().restarts) == (0, 0)
            assert it._look() is False  # nobody is left to wait for

    def test_make_env_makes_this_lanes_share(self) -> None:
        with runner(num_envs=6, num_collectors=2) as it:
            say = it.own(Say.create(2))
            it.start_collectors(crews.make_and_step_env, {"say": say})
            assert (say.hear(), say.hear()) == (3, 3)

    def test_a_factory_gets_the_simulator_and_the_overrides(self) -> None:
        spec = crews.Told(dict, {"b": 1}, {}, device="cpu", num_envs=1)
        assert spec.env_cfg_overrides == {"b": 1}
        from recollect.ipc.runner.collector import EnvSpec

        def factory(num_envs: int, sim_backend: str, **overrides: Any) -> tuple[Any, ...]:
            return num_envs, sim_backend, overrides

        assert EnvSpec(factory, {"b": 1}, "mujoco").make(3) == (3, "mujoco", {"b": 1})

    def test_a_gymnasium_id_gets_the_overrides(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gymnasium, "make_vec", lambda *args, **kwargs: (args, kwargs))
        made = collector_module.EnvSpec("CartPole-v1", {"render_mode": "rgb_array"}, "mujoco").make(3)
        assert made == (("CartPole-v1",), {"num_envs": 3, "render_mode": "rgb_array"})

    def test_the_defaults_and_that_learn_is_for_subclasses(self) -> None:
        given = inspect.signature(rc.ipc.AsyncRunner.__init__).parameters.values()
        assert {p.name: p.default for p in given if p.kind is p.KEYWORD_ONLY} == {
            "device": None, "collector_device": None, "sim_backend": "mujoco", "num_envs": 4096, "num_collectors": 1,
            "restart": "never", "max_restarts": 3, "start_method": "spawn", "collector_threads": 1, "seed": 0,
            "deadline": 60.0,
        }  # fmt: skip
        with pytest.raises(TypeError, match="abstract method '?learn"):
            rc.ipc.AsyncRunner("CartPole-v1", {}, {}, device="cpu")  # type: ignore[abstract]

    def test_seeds_differ_by_lane_and_by_restart(self) -> None:
        seeds = {lane_seed(s, lane, r) for s in range(3) for lane in range(8) for r in range(4)}
        assert len(seeds) == 96 and max(seeds) < 2**31
        assert lane_seed(5, 2, 1) == mix(mix(mix(5) + 3) + 1) >> 33  # the same in every release

    def test_pipes_and_queues_among_the_arguments_arrive(self) -> None:
        receive, send = multiprocessing.Pipe(duplex=False)
        with runner() as it:
            it.start_collectors(crews.tell_by_pipe, {"send": send})
            assert receive.poll(40.0) and receive.recv() == 0
        receive.close()
        send.close()

    def test_what_cannot_be_pickled_is_refused_and_nothing_stays(self) -> None:
        with runner() as it, pytest.raises((AttributeError, TypeError, ValueError)):
            it.start_collectors(crews.tell_who, {"say": threading.Lock()})

    def test_an_argument_that_cannot_be_unpickled_is_reported(self) -> None:
        with runner() as it:
            it.start_collectors(crews.step_until_stopped, {"say": crews.Unloadable()})
            with pytest.raises(rc.CollectorDiedError, match="cannot be loaded"):
                look(it)

    @dataclass
    class Config:
        batch_size: int = 1
        updates_per_step: int = 1

    def test_refusals_name_the_argument(self) -> None:
        for wrong, text in (
            ({"num_envs": 5, "num_collectors": 2}, "num_envs: must divide"),
            ({"num_collectors": 0}, "num_collectors"),
            ({"num_envs": 0}, "num_envs: must be"),
            ({"collector_threads": 0}, "collector_threads"),
            ({"max_restarts": -1}, "max_restarts"),
            ({"env_cfg_overrides": 3}, "env_cfg_overrides: must be a mapping of keyword arguments"),
            ({"env_cfg_overrides": {1: 2}}, "env_cfg_overrides: must be a mapping of keyword arguments"),
            ({"restart": "always"}, "restart: must be one of never, on_death"),
            ({"start_method": "fork"}, "start_method: must be one of spawn, forkserver, got 'fork'"),
            ({"deadline": float("nan")}, "deadline"),
            ({"seed": -1}, "seed"),
        ):
            with pytest.raises(ValueError, match=text):
                runner(**wrong)

        class Mine(crews.Told):
            config_type = self.Config

        with pytest.raises(ValueError, match="'batchsize'; did you mean 'batch_size'"):
            Mine("CartPole-v1", {}, {"batchsize": 3}, device="cpu")
        with pytest.raises(ValueError, match="'zzz'; did you mean '"):  # however far it is
            Mine("CartPole-v1", {}, {"zzz": 3}, device="cpu")
        with pytest.raises(ValueError, match="rl_cfg: must be a mapping or a Config, got list"):
            Mine("CartPole-v1", {}, [3], device="cpu")
        with pytest.raises(ValueError, match="env_name: must be a gymnasium id or a factory, got 3"):
            Mine(3, {}, {}, device="cpu")
        assert Mine("CartPole-v1", {}, {"batch_size": 3}, device="cpu").rl_cfg == self.Config(3)
        record = self.Config(4)
        assert Mine("CartPole-v1", {}, record, device="cpu").rl_cfg is record

    def test_what_was_given_is_kept_as_a_copy(self) -> None:
        config, overrides = {"a": 1}, {"b": 2}
        it = crews.Told("CartPole-v1", overrides, config, device="cpu", num_envs=1)
        config["a"] = overrides["b"] = 9
        assert (it.rl_cfg, it.env_cfg_overrides) == ({"a": 1}, {"b": 2})
        assert runner(env_cfg_overrides=None).env_cfg_overrides == {}

    def test_spawned_collectors_are_the_default(self) -> None:
        with crews.Told("CartPole-v1", {}, {}, device="cpu", num_envs=2) as it:
            assert it.start_method == "spawn"
            say = it.own(Say.create())
            it.start_collectors(crews.die_by, {"number": signal.SIGSEGV})
            with pytest.raises(rc.CollectorDiedError) as caught:
                look(it)
            assert caught.value.signal == "SIGSEGV"
            assert say.ring.available() == 0


class TestDeath:
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
    def test_a_signal_is_named(self, number: signal.Signals, caplog: pytest.LogCaptureFixture) -> None:
        with runner() as it:
            it.start_collectors(crews.die_by, {"number": number})
            with pytest.raises(rc.CollectorDiedError, match=number.name) as caught:
                look(it)
            error = caught.value
            assert (error.lane, error.exitcode, error.signal) == (0, -number, number.name)
            assert number.name in error.report and error.__cause__ is None
            with pytest.raises(rc.CollectorDiedError):  # it stays dead
                it.check_collectors()
        assert not caplog.records  # who was told need not read it again

    def test_its_own_exception_is_the_cause(self) -> None:
        with runner() as it:
            it.start_collectors(crews.raise_at_once, {})
            with pytest.raises(rc.CollectorDiedError) as caught:
                look(it)
            cause = caught.value.__cause__
            assert type(cause) is KeyError and cause.args == ("no such sensor",)
            assert "in raise_at_once" in str(cause.__cause__)
            assert "in raise_at_once" in caught.value.report
            assert caught.value.exitcode == 1 and caught.value.signal is None

    def test_a_wait_on_an_owned_resource_raises_within_a_second(self) -> None:
        with runner(num_collectors=2) as it:
            ring = it.own(Ring.create(crews.SLOT, 2, 2))
            say = it.own(Say.create(2))
            it.start_collectors(crews.step_until_stopped, {"say": say})
            victim, other = say.hear(), say.hear()
            threading.Timer(0.2, os.kill, (victim, signal.SIGKILL)).start()
            start = Stopwatch()
            with pytest.raises(rc.CollectorDiedError, match="SIGKILL"):
                ring.wait(30.0)  # nobody ever wrote: only the watch can notice
            assert start.s < 1.2
            assert not is_gone(other)
        assert is_gone(other)

    def test_its_group_is_killed_with_it(self) -> None:
        with runner() as it:
            say = it.own(Say.create())
            it.start_collectors(crews.with_children, {"say": say})
            worker, collector = say.hear(), say.hear()
            os.kill(collector, signal.SIGKILL)
            with pytest.raises(rc.CollectorDiedError):
                look(it)
            wait_until(lambda: is_gone(worker), 20.0)

    def test_one_that_returns_takes_what_it_started_with_it(self) -> None:
        """Whoever told it to stop may be dead before it has stopped."""
        with runner() as it:
            say = it.own(Say.create())
            it.start_collectors(crews.with_children, {"say": say})
            pids = say.hear(), say.hear()
            assert it._crew is not None
            it._crew.control.stop()
            wait_until(lambda: all(map(is_gone, pids)), 30.0)
            assert it.stats().deaths == 0

    def test_one_that_reported_but_cannot_exit_is_ended(self) -> None:
        with runner() as it:
            it.start_collectors(crews.raise_but_linger, {})
            with pytest.raises(rc.CollectorDiedError) as caught:
                look(it)
            assert type(caught.value.__cause__) is ValueError and caught.value.exitcode == 1


class TestRestart:
    def test_the_lane_starts_again_and_its_counters_go_on(self, tmp_path: Path) -> None:
        with runner(restart="on_death", num_collectors=2) as it:
            say = it.own(Say.create(2))
            it.start_collectors(crews.die_once, {"say": say, "flag": str(tmp_path / "died")})
            wait_until(lambda: it.stats().restarts == 1 and it.stats().alive == 2, 30, it.check_collectors)
            dead = next(lane for lane in it.stats().lanes if lane.restarts)
            assert (dead.deaths, dead.restarts) == (1, 1)

            def counted() -> float:
                return it.stats().lanes[dead.lane].counters.get("env_steps", 0)

            wait_until(lambda: counted() > 20, 30, it.check_collectors)  # 10 of the first life, and on
            assert {lane_seed(0, dead.lane, 0), lane_seed(0, dead.lane, 1)} <= {say.hear() for _ in range(3)}

    def test_it_waits_half_a_second_then_twice_as_long(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(crew, "monotonic", lambda: 10 * monotonic())  # a clock in a hurry
        with runner(restart="on_death", max_restarts=2) as it:
            say = it.own(Say.create())
            it.start_collectors(crews.raise_after_rows, {"say": say})
            start = monotonic()
            with (
                caplog.at_level(logging.WARNING, "recollect"),
                pytest.raises(rc.CollectorDiedError, match="2 times") as caught,
            ):
                look(it)
            assert monotonic() - start > 0.15
            delays = [r.getMessage().partition(" died and ")[2].partition(":")[0] for r in caplog.records]
            assert delays == ["starts again in 0.5 s", "starts again in 1 s"]
            assert type(caught.value.__cause__) is ValueError
            say.watch(None)  # a wait would tell of the dead collector again
            assert len({say.hear(1.0) for _ in range(3)}) == 3
            assert (it.stats().restarts, it.stats().deaths, it.stats().counters) == (2, 3, {"env_steps": 3})

    def test_an_exception_before_the_first_row_is_not_retried(self) -> None:
        with runner(restart="on_death") as it:
            it.start_collectors(crews.raise_at_once, {})
            with pytest.raises(rc.CollectorDiedError, match="before its first row"):
                look(it)
            assert it.stats().restarts == 0

    def test_a_wait_goes_on_while_a_restart_is_allowed(self, tmp_path: Path) -> None:
        with runner(restart="on_death") as it:
            ring = it.own(Ring.create(crews.SLOT, 2))
            it.start_collectors(crews.fill_after_death, {"ring": ring, "flag": str(tmp_path / "died")})
            assert int(ring.take(30.0).values["n"]) == 1  # the writer that claimed first is dead
            assert it.stats().restarts == 1

    def test_a_wait_that_ends_while_a_restart_is_due_is_a_timeout(self, tmp_path: Path) -> None:
        with runner(restart="on_death") as it:
            ring = it.own(Ring.create(crews.SLOT, 2))
            it.start_collectors(crews.fill_after_death, {"ring": ring, "flag": str(tmp_path / "died")})
            n_timeouts = 0
            while not ring.wait(0.05):  # shorter than any restart; the only one who ever wrote is dead
                n_timeouts += it.stats().deaths
            assert n_timeouts > 0 and it.stats().restarts == 1

    def test_a_wait_for_a_mailbox_goes_on_while_a_restart_is_due(self, tmp_path: Path) -> None:
        with runner(restart="on_death") as it:
            box = it.own(rc.ipc.SharedWeightSync({"w": (1,)}))
            it.start_collectors(crews.publish_after_death, {"sync": box, "flag": str(tmp_path / "died")})
            assert box.wait_newer(0, 30.0) and it.stats().restarts == 0
            while not box.wait_newer(1, 0.05):  # shorter than any restart
                pass
            assert it.stats().restarts == 1

    def test_collectors_that_have_all_returned_give_nothing_more(self) -> None:
        with runner() as it:
            ring = it.own(Ring.create(crews.SLOT, 2))
            it.start_collectors(crews.fill_once, {"ring": ring})
            assert int(ring.take(30.0).values["n"]) == 1
            ring.release()
            with pytest.raises(rc.PeerDiedError, match="all on the other side have ended; start one again"):
                ring.take(30.0)

    def test_a_resource_that_the_learner_has_closed_tells_of_no_rows(self) -> None:
        with runner() as it:
            it.own(Ring.create(crews.SLOT, 2)).cleanup()
            assert it._count_rows(0, 0) == 0

    @pytest.mark.parametrize("kind", ["ring", "replay"])
    def test_rows_in_an_owned_resource_are_a_start_too(self, kind: str) -> None:
        with runner(num_collectors=2) as it:
            if kind == "ring":
                lane = it.own(Ring.create(crews.SLOT, 2, 2)).on_lane(1)
                lane.claim()["n"][...] = 1
                lane.commit(1)
            else:
                lane = it.own(rc.ipc.ReplayBuffer(8, 1, 1, "numpy", num_lanes=2)).on_lane(1)
                one, no = np.ones((1, 1), "float32"), np.zeros(1, bool)
                lane.add(one, one, one[:, 0], one, no, no)
            assert (it._count_rows(0, 0), it._count_rows(1, 0)) == (0, 1)
            lane.close()


class TestStuck:
    def test_one_that_makes_no_progress_is_named_with_its_phase(self) -> None:
        with (
            runner(deadline=1.0) as it,
            closing(Say.create()) as say,
        ):  # not owned: the start may take its time
            it.start_collectors(crews.get_stuck, {"say": say})
            pid = say.hear()
            with pytest.raises(
                rc.DeadlineError, match=r"within 1 s.* beat was [1-9]\d*\.\d s ago in phase 'env_step'"
            ):
                look(it)
            os.kill(pid, signal.SIGKILL)

    def test_before_its_first_step_it_has_ten_times_as_long(self) -> None:
        with runner(deadline=0.2) as it, closing(Say.create()) as say:
            start = monotonic()
            it.start_collectors(crews.ignore_everything, {"say": say})
            pid = say.hear()
            with pytest.raises(rc.DeadlineError, match="within 2 s"):
                look(it)
            assert monotonic() - start > 2.0
            os.kill(pid, signal.SIGKILL)

    def test_one_that_waits_for_the_learner_is_not_stuck(self) -> None:
        with runner() as it:
            ring = it.own(Ring.create(crews.SLOT, 2))
            it.start_collectors(crews.fill_ring, {"ring": ring})
            wait_until(lambda: ring.available() == 2, 60)
            wait_for_signs_of_life(it)
            assert ring.stats().written == 2


class TestPermits:
    def test_collectors_run_in_step(self) -> None:
        with runner(num_collectors=2) as it:
            say = it.own(Say.create(2))
            it.start_collectors(crews.follow_permits, {"say": say})
            for version in range(1, 6):
                it.grant_permits(version, 3)
                it.wait_permits_taken()
                it.wait_permits_done()
                assert it.stats().counters == {"env_steps": 2 * 3 * version}
                assert (say.hear(0.0), say.hear(0.0)) == (version, version)

    def test_a_dead_lane_counts_as_done_and_joins_at_the_next_permit(self) -> None:
        with runner(num_collectors=2, restart="on_death") as it:
            say = it.own(Say.create(2))
            it.start_collectors(crews.follow_permits, {"say": say})
            it.grant_permits(1)
            it.wait_permits_done()
            victim = it.stats().lanes[0].pid
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda: it.stats().lanes[0].pid is None, 20, it.check_collectors)
            it.grant_permits(2)
            it.wait_permits_done()
            group = it._crew
            assert group is not None
            wait_until(lambda: group.is_counted_on(0), 30, it.check_collectors)
            assert group.control.has_done(0)
            it.grant_permits(3)
            it.wait_permits_done()
            said = [(say.ring.take(0.0).lane, say.hear(0.0)) for _ in range(5)]
            assert sorted(said) == [(0, 1), (0, 3), (1, 1), (1, 2), (1, 3)]

    def test_a_replacement_is_not_counted_on_before_it_is_ready(self, tmp_path: Path) -> None:
        flag = tmp_path / "slow"
        with runner(num_collectors=2, restart="on_death") as it:
            say, gate = it.own(Say.create(2)), it.own(rc.ipc.SharedWeightSync({"w": (1,)}))
            gate.write_weights({"w": np.zeros(1, "float32")})
            kwargs = {"say": say, "gate": gate, "flag": str(flag)}
            it.start_collectors(crews.follow_permits_slow_to_return, kwargs)
            it.grant_permits(1)
            it.wait_permits_done()
            flag.touch()
            os.kill(it.stats().lanes[0].pid or 0, signal.SIGKILL)
            wait_until(lambda: it.stats().lanes[0].phase == "import", 30, it.check_collectors)
            for version in (2, 3):
                it.grant_permits(version, timeout=5.0)
                it.wait_permits_taken(5.0)
                it.wait_permits_done(5.0)
            group = it._crew
            assert group is not None and not group.is_counted_on(0) and it.stats().restarts == 1
            it.wait_permits_wanted(0.0)  # by lane 1
            group._deadline = 1e-6  # one that never gets ready is stuck, one that waits for leave is not
            with pytest.raises(rc.DeadlineError, match="collector 0: .* phase 'import'"):
                look(it)
            group._deadline = 60.0
            gate.write_weights({"w": np.ones(1, "float32")})
            wait_until(lambda: group.is_counted_on(0), 30, it.check_collectors)
            it.grant_permits(4)
            it.wait_permits_done()
            said = [(say.ring.take(0.0).lane, say.hear(0.0)) for _ in range(6)]
            assert sorted(said) == [(0, 1), (0, 4), (1, 1), (1, 2), (1, 3), (1, 4)]

    def test_nobody_wants_a_permit_while_the_only_collector_is_dead(self) -> None:
        with runner(restart="on_death") as it:
            say = it.own(Say.create())
            it.start_collectors(crews.follow_permits, {"say": say})
            it.wait_permits_wanted(0.0)  # in its first life it is waited for
            it.grant_permits(1)
            it.wait_permits_done()
            os.kill(it.stats().lanes[0].pid or 0, signal.SIGKILL)
            wait_until(lambda: it.stats().lanes[0].pid is None, 20, it.check_collectors)
            with pytest.raises(rc.DeadlineError, match="permits: wanted"):
                it.wait_permits_wanted(0.0)
            it.wait_permits_wanted(30.0)
            assert it.stats().restarts == 1

    def test_one_without_a_permit_has_no_work(self) -> None:
        with runner() as it:
            say = it.own(Say.create())
            it.start_collectors(crews.follow_permits, {"say": say})
            it.grant_permits(1)
            it.wait_permits_done()
            assert it._crew is not None
            it._crew._deadline = 0.0  # any work would take too long
            it.check_collectors()

    def test_the_next_one_is_given_when_the_last_was_taken(self) -> None:
        words = Control.create(1)
        with runner() as it:
            with pytest.raises(RuntimeError, match="permits: need collectors, got none"):
                it.grant_permits(1)
            group: Any = SimpleNamespace(
                control=words, check=lambda: True, all_live=lambda done: done(0), close=words.close,
                grant=lambda version, steps: words.grant(0, version, steps), members=[],
            )  # fmt: skip
            it._crew = group
            it.grant_permits(1)
            with pytest.raises(rc.DeadlineError, match="permits: taken"):
                it.grant_permits(2, timeout=0.0)
            assert words.take(0, 0.0) == Permit(1, 1, 1)
            it.grant_permits(2, timeout=0.0)

    def test_without_a_timeout_the_learner_waits_longer_than_any_collector_may_take(self) -> None:
        waits: list[float] = []
        words = SimpleNamespace(wait_for=lambda ready, look, seconds, what: waits.append(seconds))
        with runner(deadline=7.0) as it:
            it._crew = cast(Any, SimpleNamespace(control=words, check=None, close=lambda: None, members=[]))
            it.wait_permits_done()
            it.wait_permits_taken(2.0)
        assert waits == [130.0, 2.0]  # one that is stuck in its first step is named before

    def test_a_wait_for_permits_tells_of_a_dead_collector_within_a_second(self) -> None:
        with runner() as it:
            say = it.own(Say.create())
            it.start_collectors(crews.step_until_stopped, {"say": say})
            threading.Timer(0.2, os.kill, (say.hear(), signal.SIGKILL)).start()
            start = Stopwatch()
            with pytest.raises(rc.CollectorDiedError, match="SIGKILL"):
                it._wait_permits("done", lambda crew: False, 30.0)
            assert start.s < 1.2

    def test_the_learner_does_not_wait_for_ever(self) -> None:
        with runner() as it:
            say = it.own(Say.create())
            it.start_collectors(crews.step_until_stopped, {"say": say})
            with pytest.raises(ValueError, match="timeout"):
                it.wait_permits_done(float("inf"))
            assert it._crew is not None
            say.hear()
            it._crew.grant(1, 1)
            it._crew.control._words.store(it._crew.control._at(0, 64), 0)  # as if it never took it
            with pytest.raises((rc.DeadlineError, AssertionError)):
                it._crew.control.wait_for(lambda: False, it.check_collectors, 0.05, "permits")


class TestClose:
    def test_twice_and_then_refused(self) -> None:
        it = runner(num_collectors=2)
        say = it.own(Say.create(2))
        it.start_collectors(crews.step_until_stopped, {"say": say})
        pids = {say.hear(), say.hear()}
        start = monotonic()
        it.close()
        assert monotonic() - start < 5
        it.close()
        assert all(map(is_gone, pids))
        assert it.stats().counters["env_steps"] > 0  # totals outlive their collectors
        start_again = functools.partial(it.start_collectors, crews.raise_at_once, {})
        for call in (
            it.check_collectors,
            lambda: it.own(say),
            lambda: it.learn(1),
            it.__enter__,
            start_again,
        ):
            with pytest.raises(rc.ClosedError):
                call()  # type: ignore[operator]

    def test_one_blocked_on_a_full_ring_is_woken_which_is_no_death(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with runner() as it:
            ring = it.own(Ring.create(crews.SLOT, 2))
            it.start_collectors(crews.fill_ring, {"ring": ring})
            wait_until(lambda: ring.available() == 2, 30)
            start = Stopwatch()
            it.close()
            assert start.s < 2
            assert it.stats().deaths == 0 and not caplog.records

    def test_in_a_fork_of_the_learner_it_ends_nothing(self) -> None:
        with runner() as it:
            thing = it.own(Say.create())
            it._pid += 1  # as a fork sees it
            it.close()
            it._pid -= 1
            it.check_collectors()
            assert thing.ring.available() == 0

    def test_one_that_waits_for_weights_is_woken_and_is_not_stuck(self) -> None:
        with runner() as it:
            sync = it.own(rc.ipc.SharedWeightSync({"w": (3,)}))
            say = it.own(Say.create())
            it.start_collectors(crews.wait_for_weights, {"sync": sync, "say": say})
            say.hear()
            wait_for_signs_of_life(it)
            start = Stopwatch()
            it.close()
            assert start.s < 2

    def test_one_that_waits_in_a_ring_it_attached_by_name_is_woken(self, tmp_path: Path) -> None:
        with runner() as it:
            ring, say = it.own(Ring.create(crews.SLOT, 2)), it.own(Say.create())
            ring.claim()  # a writer that lives, so that the wait is for it
            flag = tmp_path / "returned"
            given = {"name": ring.name, "say": say, "flag": str(flag)}
            it.start_collectors(crews.wait_in_a_ring_by_name, given)
            say.hear()
            it.close()
            assert flag.exists()  # by itself, and not by SIGTERM after 10 s

    @pytest.mark.parametrize("seed", [None, 7])
    def test_a_subclass_may_set_the_seed_to_none(self, seed: int | None) -> None:
        with runner() as it:
            it.seed = seed  # type: ignore[assignment]
            say = it.own(Say.create())
            it.start_collectors(crews.tell_who, {"say": say})
            assert [say.hear() for _ in range(3)][:2] == [0, 4]

    @pytest.mark.parametrize("seed", [-1, "x", 0.5])
    def test_a_seed_that_is_none_is_refused_when_collectors_start(self, seed: Any) -> None:
        with runner() as it:
            it.seed = seed
            with pytest.raises(ValueError, match="seed: must be an int of at least 0, got"):
                it.start_collectors(crews.tell_who, {})

    def test_resources_go_in_reverse_order_and_errors_are_not_swallowed(self) -> None:
        order: list[str] = []

        class Thing:
            def __init__(self, name: str) -> None:
                self.name = name

            def close(self) -> None:
                order.append(self.name)
                if self.name in "bc":
                    raise OSError(f"disk {self.name} is full")

        class Shared(Thing):
            def cleanup(self) -> None:
                order.append(f"{self.name} for all")

        it = runner()
        for name in "abc":
            it.own(Thing(name))
        it.own(Shared("d"))
        it._crew = Thing("collectors")  # type: ignore[assignment]
        with pytest.raises(OSError, match="disk c is full") as caught:
            it.close()
        assert order == ["collectors", "d for all", "c", "b", "a"]
        assert caught.value.__notes__ == ["and while closing: OSError('disk b is full')"]

    def test_from_within_itself_it_does_nothing(self) -> None:
        """A resource that ends its runner is closed before those that it uses."""
        it, order = runner(), list[str]()
        it.own(SimpleNamespace(close=lambda: order.append("first")))
        it.own(SimpleNamespace(close=lambda: (it.close(), order.append("second"))))
        it.close()
        assert order == ["second", "first"]

    def test_resources_are_closed_also_when_ctrl_c_comes_meanwhile(self) -> None:
        def hurry() -> None:
            raise KeyboardInterrupt

        it, closed = runner(), list[int]()
        it.own(SimpleNamespace(close=lambda: closed.append(1)))
        it._crew = cast(Any, SimpleNamespace(close=hurry, is_ended=True, members=[]))
        with pytest.raises(KeyboardInterrupt):
            it.close()
        assert closed == [1]

    def test_who_ignores_stop_is_ended_by_force(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(crew, "JOIN_S", 0.2)
        monkeypatch.setattr(crew, "TERM_S", 0.2)
        with runner() as it:
            say = it.own(Say.create())
            it.start_collectors(crews.ignore_everything, {"say": say})
            pid = say.hear()
        assert is_gone(pid)

    def test_a_death_that_nobody_was_told_of_is_logged_once(self, caplog: pytest.LogCaptureFixture) -> None:
        it = runner()
        it.start_collectors(crews.die_by, {"number": signal.SIGSEGV})
        assert it._crew is not None
        pid = it._crew.members[0].process.pid
        wait_until(lambda: is_gone(pid), 30)
        with caplog.at_level(logging.ERROR, "recollect"):
            it.close()
            it.close()
        assert [("SIGSEGV" in r.message) for r in caplog.records] == [True] and it.stats().deaths == 1

    def test_ctrl_c_saves_closes_and_goes_on(self) -> None:
        it = runner()
        say = it.own(Say.create())

        def work(self: Any) -> None:
            self.start_collectors(crews.step_until_stopped, {"say": say})
            pids.append(say.hear())
            os.kill(os.getpid(), signal.SIGINT)
            look(self)

        pids: list[int] = []
        it.work = work  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            it.learn(1)
        assert it.saved == 1 and is_gone(pids[0])
        with pytest.raises(rc.ClosedError):
            it.check_collectors()

    def test_a_learn_that_calls_anothers_saves_once(self, caplog: pytest.LogCaptureFixture) -> None:
        class Mine(crews.Told):
            def learn(self, *args: Any, **kwargs: Any) -> Any:
                return super().learn(*args, **kwargs)

        def work(it: Any) -> None:
            raise KeyboardInterrupt

        it = Mine("CartPole-v1", {}, {}, device="cpu", num_envs=2)
        it.work = work  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            it.learn(1)
        assert it.saved == 1 and not caplog.records

    @pytest.mark.parametrize("wrong", [OSError, ValueError, RuntimeError])
    def test_an_interrupt_goes_on_though_nothing_could_be_saved(
        self, wrong: type[Exception], caplog: pytest.LogCaptureFixture
    ) -> None:
        class Unsaved(crews.Told):
            def on_interrupt(self) -> None:
                raise wrong("cannot save")

        def work(it: Any) -> None:
            raise KeyboardInterrupt

        it = Unsaved("CartPole-v1", {}, {}, device="cpu", num_envs=2)
        it.work = work  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            it.learn(1)
        assert "was not" in caplog.text and "cannot save" in caplog.text
        with pytest.raises(rc.ClosedError):
            it.learn(1)

    def test_dropped_without_close_its_collectors_end_by_themselves_with_what_they_started(self) -> None:
        it = runner()
        say = Say.create()
        it.start_collectors(crews.with_children, {"say": say})
        pids = say.hear(), say.hear()
        start = Stopwatch()
        del it
        gc.collect()
        assert start.s < 1.0  # no finaliser blocks
        wait_until(lambda: all(map(is_gone, pids)), 20.0)
        wait_until(
            lambda: not multiprocessing.active_children(), 20.0
        )  # reaps, once its last thread has ended
        say.cleanup()


class TestLearnerKilled:
    """Collectors stop at their next step; one that cannot is killed with its group when its grace is over."""

    def test_one_that_cannot_stop_is_killed_with_what_it_started(self) -> None:
        grace_s = 0.5
        assert self.time_until_gone("never_return", grace_s).s < grace_s + 1

    def test_one_that_can_stops_by_itself_whoever_else_holds_the_learners_pipe(self) -> None:
        self.time_until_gone("with_children", 600.0, forks=True)

    @pytest.mark.soak
    def test_nothing_stays_for_six_seconds(self) -> None:
        assert collector_module.ORPHAN_GRACE_S == 5.0
        took = self.time_until_gone("never_return", 5.0)
        assert took.wall_s > 4.5 and took.s < 6.0

    def time_until_gone(self, collector: str, grace_s: float, forks: bool = False) -> Stopwatch:
        code = f"from tests.ipc import crews; crews.be_learner({collector!r}, {grace_s}, {forks})"
        learner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert learner.stdout is not None
        forked = [int(learner.stdout.readline())] if forks else []
        pids = [int(learner.stdout.readline()) for _ in range(4 if collector == "with_children" else 3)]
        learner.kill()
        learner.wait(20)
        learner.stdout.close()
        try:
            return wait_until(lambda: all(map(is_gone, pids)), 40.0)
        finally:
            for pid in forked + pids:
                if not is_gone(pid):
                    os.kill(pid, signal.SIGKILL)

    def test_at_exit_without_close(self) -> None:
        code = (
            "from tests.ipc import crews\n"
            "it = crews.runner(); say = crews.Say.create()\n"
            "it.start_collectors(crews.step_until_stopped, {'say': say}); print(say.hear())\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
        )
        assert is_gone(int(done.stdout)) and done.stderr == ""

    def test_ctrl_c_in_the_terminal_reaches_the_learner_only(self) -> None:
        code = "from tests.ipc import crews; crews.be_learner('step_until_stopped', 5.0)"
        learner = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        assert learner.stdout is not None
        pids = [int(learner.stdout.readline()) for _ in range(2)]
        os.killpg(learner.pid, signal.SIGINT)  # what a terminal does
        _, stderr = learner.communicate(timeout=200)
        assert stderr.count("KeyboardInterrupt") == 1, stderr
        assert all(map(is_gone, pids))


class TestCounters:
    def test_totals_over_lives(self) -> None:
        first = Counters()
        first.add({"env_steps": 5, "reward": 0.5}, "step")
        first.release_lane()
        second = Counters.attach(first.name)
        second.add({"env_steps": 2, "episodes": 1})
        found = first.read()
        assert found.totals == {"env_steps": 7, "reward": 0.5, "episodes": 1}
        assert (found.phase, found.n_beats, found.n_steps) == ("step", 2, 2)
        second.add({}, "reset")
        assert (first.read().phase, first.read().n_steps) == ("reset", 2)
        for wrong in ({"x": "y"}, {"x": float("nan")}, {"a\nb": 1}, {f"{i}": 1 for i in range(200)}):
            with pytest.raises(ValueError, match="must be"):
                second.add(wrong)
        with pytest.raises(ValueError, match="8192 bytes in all"):
            second.add({"n" * 8192: 1})
        for phase in ("a long name of a phase", "two\nlines", "x"):
            second.add({}, phase)
            assert first.read().phase == phase.replace("\n", " ")
            assert first.read().totals == {"env_steps": 7, "reward": 0.5, "episodes": 1}
        second.close()
        first.cleanup()

    def test_a_permit_is_taken_once(self) -> None:
        control = Control.create(1)
        assert control.take(0, 0.0) is None
        control.grant(0, 7, 3)
        assert not control.has_taken(0)
        permit = control.take(0, 1.0)
        assert permit is not None and (permit.number, permit.version, permit.steps) == (1, 7, 3)
        assert control.has_taken(0) and not control.has_done(0)
        assert control.take(0, 0.0) is None
        control.finish(0)
        assert control.has_done(0)
        control.close()

    def test_a_permit_is_not_seen_before_it_is_whole(self) -> None:
        control, seen = Control.create(1), list[Permit | None]()
        real = control._words

        def add(at: int, n: int) -> int:
            before = real.add(at, n)
            if not seen:
                seen.append(None)
                seen.append(control.take(0, 0.0))
            return before

        replace_words(control, add=add)
        control.grant(0, 7, 3)
        assert seen == [None, Permit(1, 7, 3)]
        control.close()

    def test_weights_are_read_before_the_learner_sees_the_permit_taken(self) -> None:
        control, seen = Control.create(1), list[bool]()
        control.grant(0, 7, 3)
        assert control.take(0, 1.0, lambda permit: seen.append(control.has_taken(0)))
        assert seen == [False] and control.has_taken(0)
        control.close()

    @pytest.mark.parametrize("taken", [True, False])
    def test_a_new_collector_of_a_lane_owes_nothing(self, taken: bool) -> None:
        control = Control.create(1)
        control.grant(0, 1, 1)
        if taken:
            assert control.take(0, 1.0)
        assert not control.has_done(0)
        control.join(0)
        assert control.has_taken(0) and control.has_done(0) and not control.is_ready(0)
        assert control.take(0, 0.0) is None  # the permit was another's
        control.close()

    @pytest.mark.parametrize("how", ["permit", "stop"])
    @pytest.mark.parametrize("who", ["collector", "learner"])
    def test_who_waits_for_a_permit_is_woken(
        self, who: str, how: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not when it would look again anyway."""
        monkeypatch.setattr(control_module, "LOOK_S", 30.0)
        control, found = Control.create(2), list[Any]()
        if who == "learner":
            control.grant(1, 1, 1)
            control.take(1, 1.0)
        waits = {
            "collector": lambda: control.take(1, 30.0),
            "learner": lambda: control.wait_for(lambda: control.has_done(1), lambda: None, 30.0, "permits"),
        }

        def wait() -> None:
            try:
                found.append(waits[who]())
            except rc.ClosedError:
                found.append("closed")

        thread = threading.Thread(target=wait)
        thread.start()
        wait_until(lambda: sleeps_in(thread, "take" if who == "collector" else "wait_for"), 10.0)
        if how == "stop":
            control.stop()
        elif who == "collector":
            control.grant(1, 1, 1)
        else:
            control.finish(1)
        thread.join(10.0)
        assert not thread.is_alive()
        if how == "stop":
            assert found == [None if who == "collector" else "closed"]
        control.close()

    @pytest.mark.parametrize("who", ["collector", "learner"])
    def test_what_comes_between_a_look_and_a_sleep_is_not_slept_through(
        self, who: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        control, looks = Control.create(1), list[int]()
        if who == "learner":
            control.grant(0, 1, 1)
            assert control.take(0, 1.0)

        def clock() -> float:
            """What it looks at last before it sleeps."""
            looks.append(1)
            if len(looks) == 2 and who == "collector":
                control.grant(0, 1, 1)
            elif len(looks) == 2:
                control.finish(0)
            return monotonic()

        def wait(at: int, seen: int, timeout: float) -> None:
            assert seen != control._words.load(at), "it sleeps"

        monkeypatch.setattr(control_module, "monotonic", clock)
        replace_words(control, wait=wait)
        if who == "collector":
            assert control.take(0, 20.0)
        else:
            control.wait_for(lambda: control.has_done(0), lambda: None, 20.0, "permits")
        assert len(looks) == 2
        control.close()

    @pytest.mark.parametrize("who", ["collector", "learner"])
    def test_who_waits_looks_round_ten_times_a_second(
        self, who: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        control, now, slept = Control.create(1), [100.0], list[float]()

        def wait(at: int, seen: int, timeout: float) -> None:
            slept.append(timeout)
            now[0] += timeout

        monkeypatch.setattr(control_module, "monotonic", lambda: now[0])
        replace_words(control, wait=wait)
        if who == "collector":
            assert control.take(0, 0.25) is None
        else:
            with pytest.raises(rc.DeadlineError):
                control.wait_for(lambda: False, lambda: None, 0.25, "permits")
        assert slept == pytest.approx([0.1, 0.1, 0.05])
        control.close()

    @pytest.mark.parametrize("what", ["taken", "wanted"])
    def test_the_learner_is_woken_when_a_permit_is_taken_or_wanted(
        self, what: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(control_module, "LOOK_S", 30.0)
        control = Control.create(1)
        ready = control.is_ready
        if what == "taken":
            assert control.take(0, 0.0) is None  # it is ready
            control.grant(0, 1, 1)
            ready = control.has_taken
        thread = threading.Thread(
            target=control.wait_for, args=(lambda: ready(0), lambda: None, 30.0, "permits")
        )
        thread.start()
        wait_until(lambda: sleeps_in(thread, "wait_for"), 10.0)
        assert (control.take(0, 0.0) is not None) == (what == "taken")
        thread.join(10.0)
        assert not thread.is_alive()
        control.close()

    def test_a_beat_is_progress_and_a_permit_is_not_waited_for_for_ever(self) -> None:
        control, counters = Control.create(1), Counters()
        job = collector_module.CollectorJob(0, 2, 7, "cpu", 1, 1.0, "", "", 0, cast(Any, None))
        ctx = rc.ipc.async_runner.CollectorContext(job, cast(Any, None), control, counters)
        assert control.times_ns(0)[0] == 0
        ctx.beat(env_steps=1)
        assert control.times_ns(0)[0] > 0 and counters.read().totals == {"env_steps": 1}
        for timeout in (-1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="timeout"):
                ctx.permit(timeout)
        counters.cleanup()
        control.close()
