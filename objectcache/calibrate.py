"""`objectcache calibrate`: measure both delivery orders on this machine, and write what follows into the config."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from objectcache.config import CalibrationConfig, Config, ConfigError, load_config
from objectcache.config_text import ConfigTextError, Table, table_lines, with_calibration

if TYPE_CHECKING:
    from bench.calibration.points import CalibrationPlan
    from bench.calibration.report import Calibration

RUNS, RUNS_SMOKE = 5, 2
RUNS_MAX = 1000
COMPUTES_US = "100,500,2000"
STATES = ("warm", "cold")
TRANSPORTS = ("shm", "ucx", "http")
DONE, FAILED, WRONG_USE = 0, 1, 2


def add_calibrate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "calibrate",
        help="measure this machine and write theta_bytes and its delivery costs into the config file",
        description="Start servers on loopback with the config file's [storage], fetch payloads of many sizes in both "
        "orders, every byte compared, and find the payload from which layer-major is the better one.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML, edited in place or made; without: printed")
    parser.add_argument("--data", type=Path, metavar="DIR", help="on the disk to be measured; default: temporary files")
    parser.add_argument(
        "--transport", choices=("auto", *TRANSPORTS), default="auto", help="auto (default): each that can run here"
    )
    parser.add_argument("--states", type=_states, default=STATES, metavar="LIST", help="default: warm,cold")
    parser.add_argument("--runs", type=_runs, metavar="N", help=f"counted rounds; default: {RUNS}")
    parser.add_argument(
        "--compute-us",
        type=_computes,
        default=_computes(COMPUTES_US),
        metavar="LIST",
        help=f"compute times of a layer, in microseconds, to weigh the orders by; default: {COMPUTES_US}",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, raw samples included")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curve; needs the extra 'plot'")
    parser.add_argument("--dry-run", action="store_true", help="measure and show, write no config")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes: does it work, not how fast; implies --dry-run"
    )
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """0: done; 1: could not be measured, or wrong bytes; 2: wrong use. Raises ConfigError."""
    from bench.calibration.points import full_plan, smoke_plan

    runs = options.runs or (RUNS_SMOKE if options.smoke else RUNS)
    return calibrate(options, smoke_plan(runs) if options.smoke else full_plan(runs))


def calibrate(options: argparse.Namespace, plan: CalibrationPlan) -> int:
    """Measure `plan`; as `run`."""
    problem = _problem(options)
    if problem is not None:
        print(f"objectcache calibrate: {problem}", file=sys.stderr)
        return WRONG_USE
    config = load_config(options.config if options.config is not None and options.config.exists() else None)
    target = None if options.dry_run or options.smoke else options.config
    if target is not None:
        try:
            with_calibration(_text(target), 1, _placeholder())  # before the minutes of measuring
        except ConfigTextError as error:
            raise ConfigError(f"{target}: {error}") from None
    calibration = _measured(options, plan, config)
    if isinstance(calibration, str):
        print(f"objectcache calibrate: {calibration}", file=sys.stderr)
        return FAILED
    _show(options, calibration)
    found = calibration_table(calibration)
    if target is not None:
        try:
            write_calibration(target, calibration.theta.theta_bytes, found)
        except ConfigTextError as error:
            raise ConfigError(f"{target}: {error}") from None
        print(f"\n{target}: theta_bytes and [calibration] are written")
    else:
        print("\nnothing was written; a config file would have:\n")
        print("\n".join(["[storage]", f"theta_bytes = {calibration.theta.theta_bytes}", ""]))
        print("\n".join(table_lines(("calibration",), found)))
    return DONE


def write_calibration(path: Path, theta_bytes: int, calibration: Table) -> None:
    """Edit the file, or make it. It is replaced in one step: whatever happens, the old or the new one is there. Raises
    ConfigTextError, OSError.
    """
    place = path.resolve()  # a link stays one
    text = with_calibration(_text(place), theta_bytes, calibration)
    CalibrationConfig.model_validate(calibration)
    fd, name = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
    try:
        with os.fdopen(fd, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            if place.exists():
                old = place.stat()
                os.fchmod(file.fileno(), old.st_mode & 0o7777)
                if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(file.fileno(), old.st_uid, old.st_gid)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(place)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def calibration_table(calibration: Calibration) -> dict[str, Any]:
    """What goes under `[calibration]`; figures of six significant digits, which is more than any of them has."""
    origin = calibration.origin
    table: dict[str, Any] = {"measured_at": origin["measured_at"], "machine": _machine(origin["machine"])}
    if origin["commit"] is not None:
        table["commit"] = origin["commit"] + (" with local changes" if origin["has_local_changes"] else "")
    table |= {
        "rounds": calibration.settings["runs"],
        "theta_low_bytes": calibration.theta.low_bytes,
        "theta_high_bytes": calibration.theta.high_bytes,
        "theta_side": calibration.theta.side.value,
    }
    for each in calibration.costs:
        table.setdefault(each.state.value, {})[each.transport] = {
            order: {
                name: float(f"{getattr(costs, name):.6g}")
                for name in ("request_s", "chunk_s", "layer_s", "bytes_per_s")
            }
            for order, costs in (("chunk_major", each.chunk_major), ("layer_major", each.layer_major))
        }
    return table


def _measured(options: argparse.Namespace, plan: CalibrationPlan, config: Config) -> Calibration | str:
    """The calibration, or why there is none."""
    from adapters.nixl_agent import NixlFailure
    from bench.calibration.measure import Where, measure, warm_state
    from bench.calibration.report import conclude
    from bench.content import VerificationError
    from bench.machine import describe_commit, describe_machine
    from bench.samples import State
    from bench.server import BenchServerError
    from descriptors.errors import ObjectCacheError

    storage = config.storage_settings(Path(), ucx=True)
    written = config.storage.model_dump(mode="json", exclude_none=True, exclude={"theta_bytes"})
    where = Where(options.data, storage, "\n".join([*table_lines(("storage",), written), ""]))
    states = [warm_state(plan, storage) if name == "warm" else State.COLD for name in options.states]
    is_auto = options.transport == "auto"
    transports = TRANSPORTS if is_auto else (options.transport,)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    origin = {"measured_at": now, **describe_commit(), "machine": describe_machine()}
    try:
        found = measure(plan, states, transports, where)
        if found.missing and not is_auto:
            return f"{options.transport} cannot run here: {found.missing[options.transport]}"
        return conclude(
            found.points,
            [compute_us / 1e6 for compute_us in options.compute_us],
            plan.seed,
            origin,
            {"runs": plan.runs, "seed": plan.seed, "compute_us": list(options.compute_us), "storage": written},
            found.missing,
            found.remarks,
        )
    except VerificationError as error:
        return f"WRONG BYTES: {error}"
    except (BenchServerError, ObjectCacheError, NixlFailure, ImportError, TimeoutError, ValueError) as error:
        return str(error)


def _show(options: argparse.Namespace, calibration: Calibration) -> None:
    from bench.calibration.report import plot, table, to_json

    print(table(calibration))
    if options.json is not None:
        options.json.write_text(json.dumps(to_json(calibration), indent=2) + "\n")
    if options.plot is not None:
        plot(calibration, options.plot)


def _problem(options: argparse.Namespace) -> str | None:
    """What is wrong with the options, before anything is started."""
    for file in (options.config, options.json, options.plot):
        if file is not None and not file.absolute().parent.is_dir():
            return f"{file.parent}: no such folder"
    if options.data is not None and not options.data.is_dir():
        return f"{options.data}: no such folder"
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib: pip install 'objectcache[plot]'"
    if options.config is not None and not os.access(options.config.resolve().parent, os.W_OK):
        return f"{options.config}: its folder cannot be written to"
    return None


def _text(path: Path) -> str:
    """The file's text with its own line ends; empty where there is none."""
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError:
        raise ConfigTextError("it is not UTF-8") from None


def _placeholder() -> dict[str, Any]:
    return {"rounds": 1}


def _machine(machine: dict[str, Any]) -> str:
    return f"{machine['cpu_model']}, {machine['cpu_count']} processors, {machine['memory_bytes']} bytes of memory"


def _states(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(STATES) or len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"must be some of {', '.join(STATES)}, with commas between")
    return names


def _runs(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= RUNS_MAX:
        raise argparse.ArgumentTypeError(f"must be 1 to {RUNS_MAX}")
    return int(text)


def _computes(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers") from None
    if not all(0 <= compute_us < 1e9 for compute_us in found) or len(set(found)) != len(found):
        raise argparse.ArgumentTypeError("must be different times in microseconds")
    return found
