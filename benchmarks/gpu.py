"""Check, time and train on a GPU, in one command that may be cut short: `python benchmarks/gpu.py`.

Sections, in this order: `correct` (every pattern and backend against the float64 oracle; waits for
the GPU; compiled against eager), `alone` (attention beside torch's own, by CUDA graph and from
Python), `steps` (whole training steps: ms, units/s, MFU, memory beside the plan's), `runs` (`rtx
train`, killed and resumed, `rtx eval`, `rtx sample`, ddp and fsdp with one process). Each has a
share of --minutes; what one leaves, the next ones have.

Every row is appended to OUT/gpu.jsonl as it comes. Started again with the same --out, the command
measures what is missing, with --retry also rows that ended in an error. At the end it prints all
rows and what is expected of them, and writes both to OUT/gpu.json. A section is a process of its
own: a row that kills it, that breaks its GPU, or that takes more than --row-seconds, is a row with
an error, and the section goes on behind it. All rows may need several starts.

--dry runs everything that needs no CUDA on a CPU: tiny shapes, our kernels in Triton's interpreter,
float16 for bfloat16; rows that need CUDA are named, skipped and counted.

--predict measures nothing: it prints what a roofline of an H100 expects beside the goals.

It needs no network, and beside torch, Triton and Lightning these small packages: hydra-core,
omegaconf and antlr4-python3-runtime, and for the section `runs` safetensors and filelock. The store
of the text is written here, without the packages by which `rtx data prepare` reads all kinds of
sets. Runs lie in --work, everything else (three files) in --out.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if "--dry" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read as Triton's kernels are imported

from ending import end_with_children
from gpu_sections.goals import judged, with_ratios
from gpu_sections.journal import Found, Journal, Row, measured

HERE = Path(__file__).resolve().parent
SECTIONS = {"correct": 0.25, "alone": 0.25, "steps": 0.6, "runs": 1.0}
"""Which share of the time that is left each section may take at the most."""
BROKEN = 3
"""Exit code of a section whose GPU takes no more work: it is to be started again."""


def arguments() -> argparse.Namespace:
    """Return the words of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="when to end")
    parser.add_argument(
        "--out", type=Path, default=HERE.parent / "outputs" / "gpu", help="folder of the rows"
    )
    parser.add_argument("--text", help="file that runs are trained on; default: random words")
    work_folder = Path(tempfile.gettempdir()) / "rtx-gpu"
    parser.add_argument("--work", type=Path, default=work_folder, help="folder of the runs")
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of keys: 'alone/*/8192'")
    parser.add_argument(
        "--row-seconds", type=float, default=180.0, help="the most that a row may take"
    )
    parser.add_argument("--retry", action="store_true", help="measure rows with errors again")
    parser.add_argument(
        "--dry", action="store_true", help="on a CPU, tiny, in Triton's interpreter"
    )
    parser.add_argument(
        "--predict", action="store_true", help="print what a roofline expects; nothing is measured"
    )
    parser.add_argument("--section", choices=list(SECTIONS), help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--retry-before", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args()


def rows_of(section: str, args: argparse.Namespace) -> list[Row]:
    """Return the rows of a section that are asked for; its modules import torch and Triton."""
    if section == "correct":
        from gpu_sections import correct

        rows = correct.rows(args.dry)
    elif section == "alone":
        from gpu_sections import attention_alone

        rows = attention_alone.rows(args.dry)
    elif section == "steps":
        from gpu_sections import whole_steps

        rows = whole_steps.rows(args.dry)
    else:
        from gpu_sections import runs

        rows = runs.rows(args.dry, args.work.resolve(), args.text)
    return [row for row in rows if any(fnmatch.fnmatch(row.key, pattern) for pattern in args.only)]


def work(args: argparse.Namespace) -> int:
    """Be the process of a section: measure its missing rows until the time is up."""
    journal = Journal(args.out, args.dry, args.retry_before)
    missing = journal.missing(rows_of(args.section, args))
    for done, row in enumerate(missing):
        if time.time() > args.until:
            print(
                f"{args.section}: no time for {len(missing) - done} rows, the first {row.key}",
                flush=True,
            )
            return 0
        journal.begin(row.key)
        journal.add(row.key, measured(row, args.dry))
        journal.end()
        if is_broken(args.dry):
            return BROKEN
    return 0


def is_broken(dry: bool) -> bool:
    """Free what the last row has held, and tell whether the GPU takes no more work."""
    gc.collect()
    if dry:
        return False
    import torch

    try:
        torch.compiler.reset()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return True
    return False


def supervise(section: str, args: argparse.Namespace, until: float, end: float) -> None:
    """Run the process of a section, again where a row has ended it, until it is through."""
    journal = Journal(args.out, args.dry)
    journal.end()  # of a command that was killed
    while time.time() < min(until, end):
        command = [
            sys.executable,
            str(HERE / "gpu.py"),
            *words_of(args),
            f"--section={section}",
            f"--until={until}",
        ]
        with subprocess.Popen(command) as process:
            reason = watched(process, journal, args.row_seconds, end)
        key = journal.begun()
        journal.end()
        if reason == "time is up":
            print(f"{section}: {reason} in {key or 'no row'}", flush=True)
            return
        if key is not None:
            journal.add(key, {"error": reason or f"the process ended with {process.returncode}"})
        elif process.returncode != BROKEN:
            return


def watched(
    process: subprocess.Popen[bytes], journal: Journal, row_seconds: float, end: float
) -> str:
    """Wait for a process; kill it where a row or all of the time is over, and return why."""
    while process.poll() is None:
        time.sleep(0.1)
        reason = ""
        if time.time() > end:
            reason = "time is up"
        elif row_age(journal) > row_seconds:
            reason = f"no end within {row_seconds:g} s"
        if reason:
            end_process(process)
            return reason
    return ""


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a section's process and its children; one that a kernel holds hears SIGKILL alone."""
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def row_age(journal: Journal) -> float:
    """Return for how many seconds the present row has been measured."""
    try:
        return time.time() - journal.current.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def words_of(args: argparse.Namespace) -> list[str]:
    """Return the words that a section's process gets."""
    words = [
        f"--out={args.out}",
        f"--work={args.work}",
        *["--dry"] * args.dry,
        f"--retry-before={args.retry_before}",
        "--only",
        *args.only,
    ]
    return words if args.text is None else [f"--text={args.text}", *words]


def facts(args: argparse.Namespace) -> Found:
    """Return where this is measured, and with which code."""
    device = "cpu" if args.dry else "cuda"
    command = f"import json, machine as m; print(json.dumps([m.machine({device!r}, 1), m.code()]))"
    done = subprocess.run([sys.executable, "-c", command], cwd=HERE, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"torch finds no GPU here; --dry needs none: {done.stderr.strip().splitlines()[-1]}"
        )
    name, versions = json.loads(done.stdout)
    return {"machine": name, **versions}


def report(args: argparse.Namespace, known: Found) -> None:
    """Print all rows and the goals, and write them to gpu.json."""
    rows = Journal(args.out, args.dry).rows()
    listed = with_ratios(rows)
    expected = judged({} if args.dry else rows)
    for row in listed:
        print(line_of(row))
    print(f"\n{'goal':<78}{'target':>10}{'measured':>10}")
    for goal in expected:
        measured_there = "-" if goal["measured"] is None else f"{goal['measured']:g}"
        verdict = {True: "met", False: "MISSED", None: "not measured"}[goal["met"]]
        print(f"{goal['goal']:<78}{goal['target']:>10}{measured_there:>10}  {verdict}")
    (args.out / "gpu.json").write_text(
        json.dumps({**known, "rows": listed, "goals": expected}, indent=1) + "\n"
    )
    counts = {
        "rows": len(rows),
        "failed": sum(row.get("pass") is False for row in listed),
        "errors": sum("error" in row for row in listed),
        "skipped, as they need CUDA": sum("skipped" in row for row in listed),
    }
    print("\n" + ", ".join(f"{count} {name}" for name, count in counts.items()), flush=True)


HIDDEN = ("key", "dry", "at", "seconds", "errors", "where", "said", "tolerance", "reference")
"""Fields that a line of the table leaves out."""


def line_of(row: Found) -> str:
    """Return a row as a line."""
    return f"{row['key']:<48}" + "  ".join(
        f"{k}={text_of(v)}" for k, v in row.items() if k not in HIDDEN
    )


def text_of(value: object) -> str:
    """Return a value in a few letters."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:120]


def predict() -> None:
    """Print what is expected of an H100 before anything was measured there."""
    from gpu_sections import predictions

    print(f"{'goal':<78}{'target':>10}{'predicted':>11}")
    for row in predictions.predicted():
        value = "-" if row["predicted"] is None else f"{row['predicted']:g}"
        print(f"{row['goal']:<78}{row['target']:>10}{value:>11}")


def main() -> int:
    """Run all sections, or be one of them."""
    args = arguments()
    if args.predict:
        predict()
        return 0
    end_with_children()
    if args.section:
        return work(args)
    known = facts(args)
    began = time.time()
    args.retry_before = began if args.retry else 0.0
    end = began + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = [
        name
        for name in SECTIONS
        if any(fnmatch.fnmatch(f"{name}/", p.split("/")[0] + "/") for p in args.only)
    ]
    for section in wanted:
        now = time.time()
        share = 1.0 if section == wanted[-1] else SECTIONS[section]
        supervise(section, args, now + share * (end - now), end)
    report(args, known)
    return 0


if __name__ == "__main__":
    sys.exit(main())
