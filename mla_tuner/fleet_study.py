"""Who tunes which bucket: an Optuna study in a database that all machines of a fleet reach.

A trial is one machine's attempt at one bucket. It gets its number and its bucket in one
transaction, and of two attempts the lower number counts: so each bucket is tuned once, whoever dies
when. The only importer of sqlalchemy.
"""

from __future__ import annotations

import platform
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TypeVar

import optuna
import sqlalchemy
from optuna.exceptions import ExperimentalWarning, StorageInternalError, UpdateFinishedTrialError
from optuna.storages import RDBStorage, fail_stale_trials
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy.exc import SQLAlchemyError

from .errors import FleetError
from .measure import one_line
from .shapes import Bucket

HEARTBEAT_S = 10
GRACE_S = 60  # without a heartbeat, after which a machine counts as dead; by the database's clock
PATIENCE_S = 60.0  # that a database may be away, to be started again
RETRY_S = 1.0
CONNECT_S = 10
LIVES = 3  # machines that may die at a bucket
LOCK = 0x6D6C61  # the key of what is held while tables are made
PREFIX, SEPARATOR = "mla-tuner", " | "  # of a study's name
FAULTS = (StorageInternalError, SQLAlchemyError)
MALFORMED = (ValueError, TypeError, LookupError)  # what Optuna raises at rows that it never wrote

State = Literal["running", "done", "failed", "dead"]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Attempt:
    """One machine's attempt at a bucket.

    `result` is what `finish` was given, None until then; `reason` what `fail` was given, "" for a
    machine that died. `number` orders all attempts of a fleet.
    """

    number: int
    bucket: Bucket
    state: State
    machine: str
    reason: str
    result: Any

    @property
    def holds(self) -> bool:
        """Whether nobody else needs to try."""
        return self.state in ("running", "done")


class FleetStudy:
    """The study of the machines that are `like` this one, at a database's `url`.

    like: what they have in common, in words and in order; machines that differ in any of it are not
    of this fleet. A database holds one fleet.

    Raises:
        FleetError: here and in every method, one line without the password: the database is not
            there, or was away for longer than `PATIENCE_S`; here, too: it is another fleet's.
    """

    def __init__(self, url: str, like: Sequence[str]) -> None:
        address, self.place = _address(url)
        self.storage = _open(address, self.place)
        self._met: set[int] = set()
        try:
            with self._one_line("cannot use"):
                self._join(like)
        except FleetError:
            self.close()
            raise

    def __enter__(self) -> FleetStudy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self.storage.remove_session()
        self.storage.engine.dispose()

    def attempts(self) -> list[Attempt]:
        """All that were not given back, by number, after those of dead machines were ended.

        What failed or died before this machine joined is left out: it may be tried again.
        """
        trials = self._patiently(self._trials)
        found = [attempt for trial in trials if (attempt := _attempt(trial))]
        return [each for each in found if each.holds or each.number >= self.first]

    def claim(self, bucket: Bucket) -> int | None:
        """Take a bucket: the id of the attempt, or None where another machine has or had it."""
        attributes = {"bucket": list(bucket), "machine": platform.node()}
        template = create_trial(state=TrialState.RUNNING, user_attrs=attributes)
        mine = self._patiently(lambda: self.storage.create_new_trial(self.id, template))
        number = self._patiently(lambda: self.storage.get_trial_number_from_id(mine))
        rivals = [each for each in self.attempts() if each.bucket == bucket and each.holds]
        if any(each.number < number for each in rivals):
            self._end(mine, TrialState.PRUNED)
            return None
        return mine

    @contextmanager
    def beating(self, attempt: int) -> Iterator[None]:
        """Tells the others that this machine lives; within, an error gives the bucket back."""
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(HEARTBEAT_S):
                with suppress(*FAULTS):  # the next one counts
                    self.storage.record_heartbeat(attempt)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            with suppress(*FAULTS, UpdateFinishedTrialError):  # else silence says the same
                self.storage.set_trial_state_values(attempt, TrialState.PRUNED)
            raise
        finally:
            stop.set()
            thread.join()

    def finish(self, attempt: int, speedup: float, result: Mapping[str, Any]) -> bool:
        """The bucket is tuned; False where this machine was thought to be dead by then."""
        return self._end(attempt, TrialState.COMPLETE, [speedup], result=result)

    def fail(self, attempt: int, reason: str) -> None:
        """The bucket can't be tuned on such a device."""
        self._end(attempt, TrialState.FAIL, reason=reason)

    def give_back(self, attempt: int) -> None:
        """The bucket may go to another machine."""
        self._end(attempt, TrialState.PRUNED)

    # --- inside ------------------------------------------------------------------------------

    def _join(self, like: Sequence[str]) -> None:
        name = SEPARATOR.join((PREFIX, *like))
        others = [
            each.study_name
            for each in self.storage.get_all_studies()
            if each.study_name.startswith(PREFIX + SEPARATOR)
        ]
        if others and name not in others:
            raise FleetError(_refusal(others[0].split(SEPARATOR)[1:], like, self.place))
        self.study = optuna.create_study(
            storage=self.storage, study_name=name, direction="maximize", load_if_exists=True
        )
        self.id = self.storage.get_study_id_from_name(name)
        self.first = len(self.study.get_trials(deepcopy=False))

    def _trials(self) -> list[FrozenTrial]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            fail_stale_trials(self.study)
        trials = self.study.get_trials(deepcopy=False)
        for trial in trials:
            # A first heartbeat, of our own attempt or of one whose machine died before it: Optuna
            # would wait for ever for that.
            if trial.state == TrialState.RUNNING and trial.number not in self._met:
                self._met.add(trial.number)
                attempt = self.storage.get_trial_id_from_study_id_trial_number(
                    self.id, trial.number
                )
                self.storage.record_heartbeat(attempt)
        return trials

    def _end(
        self,
        attempt: int,
        state: TrialState,
        values: Sequence[float] | None = None,
        **attributes: object,
    ) -> bool:
        def end() -> bool:
            try:
                for name, value in attributes.items():
                    self.storage.set_trial_user_attr(attempt, name, value)
                self.storage.set_trial_state_values(attempt, state, values)
            except UpdateFinishedTrialError:
                return self.storage.get_trial(attempt).state == state
            return True

        return self._patiently(end)

    def _patiently(self, action: Callable[[], Value]) -> Value:
        """What an action gives that may be done twice, when the database is there again."""
        deadline = time.monotonic() + PATIENCE_S
        with self._one_line("lost"):
            while time.monotonic() < deadline:
                with suppress(*FAULTS):
                    return action()
                time.sleep(RETRY_S)
            return action()

    @contextmanager
    def _one_line(self, what: str) -> Iterator[None]:
        cure = "; tuned buckets are stored here, the same command goes on"
        try:
            yield
        except FAULTS as error:
            text = f"{what} the storage {self.place}: {_cause(error)}"
            raise FleetError(f"{text}{cure if what == 'lost' else ''}") from None
        except MALFORMED as error:
            text = f"cannot use the storage {self.place}: malformed data ({one_line(error)})"
            raise FleetError(text) from None


def _attempt(trial: FrozenTrial) -> Attempt | None:
    """A trial that was not given back; None for one that was, or is of no bucket."""
    states: dict[TrialState, State] = {
        TrialState.RUNNING: "running",
        TrialState.COMPLETE: "done",
        TrialState.FAIL: "failed" if "reason" in trial.user_attrs else "dead",
    }
    fields = trial.user_attrs.get("bucket")
    if trial.state not in states or not isinstance(fields, list):
        return None
    machine, reason = (str(trial.user_attrs.get(name, "")) for name in ("machine", "reason"))
    state, result = states[trial.state], trial.user_attrs.get("result")
    with suppress(TypeError):  # no bucket's fields, or none that can be looked up
        bucket = Bucket(*fields)
        hash(bucket)
        return Attempt(trial.number, bucket, state, machine, reason, result)
    return None


# --- the database --------------------------------------------------------------------------------


def _address(url: str) -> tuple[str, str]:
    """The URL as Optuna takes it, and what of it may be printed: no user, no password.

    Raises:
        FleetError: it is none of PostgreSQL's or SQLite's.
    """
    wanted = "expected --storage postgresql://[user@]host[:port]/database"
    try:
        parsed = sqlalchemy.make_url(url)
    except (SQLAlchemyError, ValueError):
        raise FleetError(f"{wanted}; got what is no URL") from None
    backend = parsed.get_backend_name()
    if backend in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
        place = f"{parsed.host or 'localhost'}:{parsed.port or 5432}/{parsed.database or ''}"
        if not re.fullmatch(r"[\w.:-]*/[\w.-]*", place):  # half a password may be in it
            raise FleetError(f"{wanted}; got a name with other characters: write them as %40 for @")
    elif backend == "sqlite" and parsed.database:
        place = parsed.database
    else:
        raise FleetError(f"{wanted}; got another kind of URL")
    return parsed.render_as_string(hide_password=False), place


def _open(address: str, place: str) -> RDBStorage:
    """Tables are made where there are none. Raises FleetError: the database can't be used."""
    postgresql = address.startswith("postgresql")
    options = {"connect_timeout": CONNECT_S} if postgresql else {"timeout": PATIENCE_S}
    try:
        with warnings.catch_warnings(), _alone(address, options):
            warnings.simplefilter("ignore", ExperimentalWarning)
            return RDBStorage(
                address.replace("{", "{{").replace("}", "}}"),  # it fills in templates
                {"pool_pre_ping": True, "connect_args": options},
                heartbeat_interval=HEARTBEAT_S,
                grace_period=GRACE_S,
            )
    except ImportError:
        text = "PostgreSQL needs psycopg: pip install 'mla-tuner[fleet]'"
        raise FleetError(text) from None
    except (*FAULTS, RuntimeError) as error:  # RuntimeError: another Optuna's tables, or others
        raise FleetError(f"cannot use the storage {place}: {_cause(error)}") from None


@contextmanager
def _alone(address: str, options: dict[str, Any]) -> Iterator[None]:
    """Within it no other machine makes tables in a PostgreSQL database.

    Raises:
        RuntimeError: it is a SQLite file that something else keeps its tables in.
    """
    engine = sqlalchemy.create_engine(address, poolclass=sqlalchemy.NullPool, connect_args=options)
    with engine.connect() as connection:
        if engine.name == "postgresql":
            lock = sqlalchemy.text("SELECT pg_advisory_lock(:key)")
            connection.execute(lock, {"key": LOCK})  # given back when the connection ends
        else:
            tables = sqlalchemy.inspect(connection).get_table_names()
            if tables and "studies" not in tables:  # a tuning database, for instance
                raise RuntimeError("it is the database of another program")
        yield


def _cause(error: Exception) -> str:
    """One line of an error: what the database said, without SQL and what stood in it."""
    cause: BaseException = error
    while isinstance(cause, StorageInternalError) and cause.__cause__:
        cause = cause.__cause__
    cause = getattr(cause, "orig", None) or cause
    text = " ".join(str(cause).split()).split(" Multiple connection attempts")[0]
    return text[:300]


def _refusal(theirs: Sequence[str], mine: Sequence[str], place: str) -> str:
    have = [pair for pair in zip(mine, theirs, strict=False) if pair[0] != pair[1]]
    here, there = (", ".join(each) for each in zip(*have, strict=True))
    return (
        f"this machine can't join the fleet of {place}: it has {here}, the fleet {there}; "
        "another database makes a fleet of its own"
    )
