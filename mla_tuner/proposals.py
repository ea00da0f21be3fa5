"""Which plans to measure next: all, or what TPE proposes. The only importer of optuna."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import optuna

from .evidence import Measurement
from .plan import Plan
from .shapes import MAX_PARTITIONS

optuna.logging.set_verbosity(optuna.logging.ERROR)
OPTUNA_VERSION = str(optuna.__version__)

EXHAUSTIVE = 48  # plans that are all measured; more are searched by TPE
GROUP = 12  # plans that TPE proposes at a time, to be measured side by side
GROUPS = 4
GAIN = 1.01  # of a group over what was found before, else a search that is in no doubt ends


class Proposals(Protocol):
    """Plans to measure next, group by group; an empty group ends the search."""

    def ask(self) -> list[Plan]: ...

    def tell(self, found: Sequence[Measurement]) -> None: ...


class Grid:
    """Few plans: all of them, in one group, so that every pair of them meets in the same rounds."""

    def __init__(self, plans: Sequence[Plan], seed: int) -> None:
        self.plans = plans
        places = list(range(len(plans)))
        sampler = optuna.samplers.GridSampler({"plan": places}, seed=seed)
        self.study = optuna.create_study(sampler=sampler)
        self.trials: dict[Plan, optuna.Trial] = {}

    def ask(self) -> list[Plan]:
        if self.trials:
            return []
        for _ in self.plans:
            trial = self.study.ask()
            place = trial.suggest_categorical("plan", list(range(len(self.plans))))
            self.trials[self.plans[place]] = trial
        return [plan for plan in self.plans if plan in self.trials]

    def tell(self, found: Sequence[Measurement]) -> None:
        for measurement in found:
            if measurement.plan in self.trials:
                with suppress(RuntimeError):  # the sampler stops a study.optimize that isn't there
                    _tell(self.study, self.trials[measurement.plan], measurement)


class Tpe:
    """Many plans: groups that TPE proposes, the first being the best by the analytic prior.

    A last group holds what was not proposed around the best: TPE's choice differs from run to run.
    patient: whether all groups are asked for; else only as long as they bring a gain. That saves
    time where times are exact, and where they aren't a gain may be missed.
    """

    def __init__(self, plans: Sequence[Plan], seed: int, patient: bool = True) -> None:
        self.study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=GROUP)
        )
        self.variants: dict[str, list[Plan]] = {}  # by path and tile, ascending partitions
        for plan in sorted(plans, key=lambda plan: plan.partitions):
            self.variants.setdefault(_variant(plan), []).append(plan)
        self.groups = 0
        self.patient, self.gained, self.closed = patient, True, False
        self.seen: dict[Plan, Measurement] = {}
        self.trials: dict[Plan, list[optuna.Trial]] = {}
        for plan in plans[:GROUP]:
            self.study.enqueue_trial({"variant": _variant(plan), "partitions": plan.partitions})

    def ask(self) -> list[Plan]:
        self.groups += 1
        self.trials = {}
        if self.closed:
            return []
        if self.groups <= GROUPS and (self.patient or self.gained) and (group := self._proposed()):
            return group
        self.closed = True
        return self._neighbours()

    def _proposed(self) -> list[Plan]:
        """Unmeasured plans that the sampler likes; empty where it only likes what it has seen."""
        for _ in range(3 * GROUP):  # TPE likes to repeat itself on a small space
            trial = self.study.ask()
            plan = self._plan(trial)
            if plan in self.seen:
                _tell(self.study, trial, self.seen[plan])
            else:
                self.trials.setdefault(plan, []).append(trial)
            if len(self.trials) == GROUP:
                break
        return list(self.trials)

    def _neighbours(self) -> list[Plan]:
        """Unmeasured plans around the best one: its variant's nearest partition counts."""
        ratios = self._ratios()
        if not ratios:
            return []
        best = max(ratios, key=ratios.__getitem__)
        near = sorted(
            (plan for plan in self.variants.get(_variant(best), []) if plan not in self.seen),
            key=lambda plan: abs(math.log(plan.partitions / best.partitions)),
        )
        return near[:GROUP]

    def _ratios(self) -> dict[Plan, float]:
        return {plan: m.ratio for plan, m in self.seen.items() if m.ratio is not None}

    def _best(self) -> float:
        return max(self._ratios().values(), default=0.0)

    def _plan(self, trial: optuna.Trial) -> Plan:
        """The legal plan nearest to what the sampler wants."""
        variant = trial.suggest_categorical("variant", list(self.variants))
        wanted = trial.suggest_int("partitions", 1, MAX_PARTITIONS, log=True)
        return min(self.variants[variant], key=lambda plan: abs(plan.partitions - wanted))

    def tell(self, found: Sequence[Measurement]) -> None:
        before = self._best()
        self.gained = any((m.ratio or 0.0) > GAIN * before for m in found)
        for measurement in found:
            self.seen[measurement.plan] = measurement
            for trial in self.trials.get(measurement.plan, []):
                _tell(self.study, trial, measurement)


def _variant(plan: Plan) -> str:
    return f"{plan.path} {plan.tile}"


def _tell(study: optuna.Study, trial: optuna.Trial, measurement: Measurement) -> None:
    """The objective is the log of time over `mlx`'s, paired within rounds; failures have none."""
    if measurement.ratio is None:
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    else:
        study.tell(trial, -math.log(measurement.ratio))
