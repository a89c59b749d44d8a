"""Compare position encodings in fairseq on texts longer than the training length.

It is a small form of the recipe of ALiBi (Press et al., 2022, arXiv 2108.12409). `make
fairseq-demo` runs it. It trains a small `transformer_lm_wiki103` for each encoding. Then it
evaluates each model, in blocks and sliding, at several times the trained length. It prints a table,
and writes results.json and perplexity.png to --out, beside checkpoints and a log of every command.
After an interruption, the same command continues the work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib
from fairseq_text import write_text
from wavepe.analysis.plots.drawing import line_looks
from wavepe.experiments.environment import cpu_name, version_of
from wavepe.experiments.report import headings, rows_of
from wavepe.experiments.tables import print_table

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ENCODINGS = ("wavelet", "rope", "rope:theta={length}", "alibi", "sinusoidal")
# Each rope is also evaluated with this option, from the same checkpoint.
SCALED = "inference_theta=scaled"
# The recipe of docs/guides/fairseq.md, with other sizes, dropouts and lengths of the schedule.
RECIPE = """--task language_modeling --arch transformer_lm_wiki103 --criterion adaptive_loss --cpu
    --decoder-layers 2 --decoder-embed-dim 128 --decoder-input-dim 128 --decoder-output-dim 128
    --decoder-ffn-embed-dim 512 --decoder-attention-heads 4 --dropout 0.1 --attention-dropout 0.1
    --activation-dropout 0 --adaptive-softmax-dropout 0 --optimizer nag --lr 2.0
    --lr-scheduler cosine --warmup-init-lr 1e-07 --stop-min-lr 1e-09 --min-lr 0.0001
    --clip-norm 0.1 --sample-break-mode none --ddp-backend legacy_ddp
    --required-batch-size-multiple 1 --no-epoch-checkpoints --keep-interval-updates 1
    --disable-validation --no-progress-bar --num-workers 0 --log-interval 50"""
BATCH = 2048  # tokens in an update
EVALUATED = re.compile(r"Evaluated ([\d,]+) tokens.*?Loss \(base 2\): ([\d.]+)", re.S)


class Failed(Exception):
    """An error that ends the demo with its message in one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return 0, or 1 if a command failed or the folder has other settings."""
    args = arguments(argv)
    try:
        results = Demo(args).run()
    except (Failed, ValueError, OSError) as error:
        print(f"fairseq_demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"fairseq_demo: interrupted; {args.out} keeps finished work", file=sys.stderr)
        return 130
    print_tables(results)
    draw(results, args.out / "perplexity.png")
    print(f"\nwrote {args.out / 'results.json'} and {args.out / 'perplexity.png'}")
    return 0


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/fairseq-demo"), metavar="DIR",
                        help="folder of models and results (default: %(default)s)")  # fmt: skip
    parser.add_argument("--data", metavar="PATH", help="a text file, or a folder of text files "
                        "(default: Python's documentation, or its library)")  # fmt: skip
    parser.add_argument(
        "--encodings",
        nargs="+",
        metavar="SPEC",
        help="position encodings (default: " + " ".join(ENCODINGS) + ")",
    )
    parser.add_argument("--length", type=int, default=128, metavar="N",
                        help="trained length in words (default: %(default)s)")  # fmt: skip
    parser.add_argument(
        "--times",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8],
        metavar="N",
        help="evaluated lengths, as multiples of --length (default: 1 2 4 8)",
    )
    parser.add_argument("--updates", type=int, default=600, metavar="N",
                        help="updates of each training (default: %(default)s)")  # fmt: skip
    parser.add_argument("--words", type=int, default=5000, metavar="N",
                        help="size of the vocabulary (default: %(default)s)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=1, metavar="N",
                        help="seed of weights and batches (default: %(default)s)")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 4), metavar="N",
                        help="number of commands at the same time, each with one thread (default: "
                        "%(default)s)")  # fmt: skip
    args = parser.parse_args(argv)
    given = args.encodings or [spec.format(length=args.length) for spec in ENCODINGS]
    args.encodings = list(dict.fromkeys(given))
    return args


class Demo:
    """The steps of the demo; each is a command of fairseq that runs once."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out = args, args.out
        self.data, self.logs = self.out / "data-bin", self.out / "logs"

    def run(self) -> dict:
        """Run all steps, and return the results."""
        self.logs.mkdir(parents=True, exist_ok=True)
        self.check_settings()
        description = self.prepare()
        done = self.in_parallel(self.train, self.args.encodings)
        trainings = dict(zip(self.args.encodings, done, strict=True))
        rows = [(spec, spec) for spec in trainings]
        rows += [
            (spec, f"{spec}{',' if ':' in spec else ':'}{SCALED}")
            for spec in trainings
            if spec.partition(":")[0] == "rope" and SCALED not in spec
        ]
        cells = [
            (trained, spec, protocol, times * self.args.length)
            for trained, spec in rows
            for protocol in ("blocks", "sliding")
            for times in self.args.times
        ]
        found = dict(zip(cells, self.in_parallel(self.evaluate, cells), strict=True))
        if len({tokens for tokens, _ in found.values()}) > 1:
            raise Failed("the evaluations differ in their number of tokens")
        return self.keep(description, trainings, rows, found)

    def check_settings(self) -> None:
        """Raise if the folder was begun with other settings."""
        kept = self.out / "settings.json"
        now = {k: str(v) for k, v in vars(self.args).items() if k not in ("out", "jobs")}
        now["recipe"] = " ".join(RECIPE.split())
        # Evaluated lengths and encodings may change.
        for key in ("times", "encodings"):
            del now[key]
        if kept.exists() and json.loads(kept.read_text()) != now:
            before = json.loads(kept.read_text())
            changed = [
                f"{key} {before.get(key)} -> {now[key]}"
                for key in now
                if before.get(key) != now[key]
            ]
            raise Failed(f"{self.out} was begun with other settings ({', '.join(changed)}): "
                         "give another --out")  # fmt: skip
        kept.write_text(json.dumps(now, indent=1) + "\n")

    def prepare(self) -> str:
        """Write text, dictionary and binary data; return a description of the text."""
        said = self.out / "text.txt"
        if said.exists():
            return said.read_text().strip()
        began = time.perf_counter()
        description = write_text(self.out, self.args.data)
        text = {part: str(self.out / f"{part}.txt") for part in ("train", "valid", "test")}
        self.command(
            "preprocess", "preprocess", "--only-source", "--trainpref", text["train"],
            "--validpref", text["valid"], "--testpref", text["test"], "--destdir", str(self.data),
            "--nwordssrc", str(self.args.words), "--workers", "1",
        )  # fmt: skip
        said.write_text(description + "\n")
        print(f"text: {description} ({time.perf_counter() - began:.0f} s)", flush=True)
        return description

    def train(self, spec: str) -> float:
        """Run one training, and return its seconds."""
        folder = self.folder(spec)
        done = folder / "seconds.txt"
        if done.exists():
            return float(done.read_text())
        folder.mkdir(parents=True, exist_ok=True)
        updates, began = self.args.updates, time.perf_counter()
        cutoffs = f"{self.args.words // 5},{self.args.words // 2}"
        self.command(
            f"train-{folder.name}", "train", str(self.data), *RECIPE.split(), "--pos-enc", spec,
            "--save-dir", str(folder), "--tokens-per-sample", str(self.args.length),
            "--max-tokens", str(BATCH), "--max-update", str(updates),
            "--lr-period-updates", str(updates), "--warmup-updates", str(max(updates // 10, 1)),
            "--save-interval-updates", str(max(updates // 5, 1)), "--seed", str(self.args.seed),
            "--adaptive-input-cutoff", cutoffs, "--adaptive-softmax-cutoff", cutoffs,
        )  # fmt: skip
        seconds = time.perf_counter() - began
        done.write_text(f"{seconds:.1f}\n")
        print(f"trained {spec}: {updates} updates ({seconds:.0f} s)", flush=True)
        return seconds

    def evaluate(self, cell: tuple[str, str, str, int]) -> tuple[int, float]:
        """Return the number of scored tokens and the loss in bits per token.

        With "sliding", three quarters of each block are context and are not scored.
        """
        trained, spec, protocol, length = cell
        folder = self.folder(trained)
        name = f"eval-{self.folder(spec).name}-{protocol}-{length}"
        log = self.logs / f"{name}.log"
        # Figures that are older than the checkpoint are not used.
        fresh = log.exists() and log.stat().st_mtime > (folder / "seconds.txt").stat().st_mtime
        found = EVALUATED.search(log.read_text()) if fresh else None
        if found is None:
            overrides = [] if spec == trained else ["--model-overrides", str({"pos_enc": spec})]
            self.command(
                name, "eval-lm", str(self.data), "--path", str(folder / "checkpoint_last.pt"),
                "--gen-subset", "test", "--sample-break-mode", "none", "--cpu",
                "--tokens-per-sample", str(length), "--max-tokens", str(max(BATCH, length)),
                "--softmax-batch", "512",
                "--context-window", str(length * 3 // 4 if protocol == "sliding" else 0),
                "--no-progress-bar", "--num-workers", "0", *overrides,
            )  # fmt: skip
            found = EVALUATED.search(log.read_text())
            print(f"evaluated {spec}, {protocol}, {length} tokens", flush=True)
        if found is None:
            raise Failed(f"no perplexity in {log}")
        return int(found[1].replace(",", "")), float(found[2])

    def keep(self, description: str, trainings: dict, rows: list, found: dict) -> dict:
        """Write results.json."""
        runs = []
        for trained, spec in rows:
            for protocol in ("blocks", "sliding"):
                lengths = [times * self.args.length for times in self.args.times]
                loss = {n: found[trained, spec, protocol, n][1] for n in lengths}
                runs.append({
                    "encoding": spec,
                    "protocol": protocol,
                    "seed": self.args.seed,
                    "perplexity": {str(n): 2**bits for n, bits in loss.items()},
                    "seconds": trainings[trained],
                })  # fmt: skip
        packages = ("wavepe", "fairseq", "fairseq-fixed", "torch", "numpy")
        results = {
            "train_length": self.args.length,
            "updates": self.args.updates,
            "tokens_per_update": BATCH,
            "text": description,
            "scored_tokens": next(iter(found.values()))[0],
            "runs": runs,
            "environment": {
                "machine": cpu_name(),
                "jobs": self.args.jobs,
                "python": platform.python_version(),
                "date": time.strftime("%Y-%m-%d"),
                **{name: version_of(name) for name in packages if version_of(name)},
            },
        }
        (self.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        return results

    def folder(self, spec: str) -> Path:
        """Return the folder of a spec's checkpoints; fairseq splits paths at colons."""
        return self.out / "checkpoints" / re.sub(r"[^\w.]+", "-", spec)

    def in_parallel(self, step, items) -> list:
        """Run the step for each item, and return the results; the first failure ends all."""
        with ThreadPoolExecutor(self.args.jobs) as pool:
            futures = [pool.submit(step, item) for item in items]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def command(self, name: str, command: str, *words: str) -> None:
        """Run a command of fairseq with one thread; its output goes to a log file."""
        program = Path(sys.executable).parent / f"wavepe-fairseq-{command}"
        log = self.logs / f"{name}.log"
        quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        with log.open("w") as file:
            done = subprocess.run(
                [str(program), *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | quiet,
            )
        if done.returncode:
            last = "\n".join(log.read_text().splitlines()[-5:])
            raise Failed(f"wavepe-fairseq-{command} ended with {done.returncode} ({log}):\n{last}")


def print_tables(results: dict) -> None:
    """Print a table of perplexity per word for each protocol."""
    said = {
        "blocks": "each block in one pass",
        "sliding": "three quarters of each block are read again and not scored",
    }
    print(f"\n{results['text']}; trained on {results['train_length']} tokens")
    for protocol, words in said.items():
        runs = [run for run in results["runs"] if run["protocol"] == protocol]
        lengths = sorted(map(int, runs[0]["perplexity"]))
        print(f"\nPerplexity per word, {protocol}: {words} (* best of its column)")
        heads = headings(lengths, results["train_length"])
        print_table("", "encoding", heads, rows_of(runs, lengths))


def draw(results: dict, path: Path) -> None:
    """Draw perplexity over the evaluated length."""
    encodings = list(dict.fromkeys(run["encoding"] for run in results["runs"]))
    looks = dict(zip(encodings, line_looks(encodings), strict=True))
    figure, axes = plt.subplots(1, 2, figsize=(6.6, 4.6), sharey=True, layout="constrained")
    for axis, protocol in zip(axes, ("blocks", "sliding"), strict=True):
        for run in results["runs"]:
            if run["protocol"] == protocol:
                lengths = list(map(int, run["perplexity"]))
                look = looks[run["encoding"]]
                axis.plot(lengths, run["perplexity"].values(), label=run["encoding"], **look)
        axis.set(xscale="log", title=protocol, xlabel="tokens evaluated at a time")
        axis.set_xticks(lengths, list(map(str, lengths)))
        axis.minorticks_off()
        axis.axvline(results["train_length"], color="gray", linewidth=0.5)
    axes[0].set(yscale="log", ylabel="perplexity per word")
    axes[0].yaxis.set_minor_formatter("{x:g}")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", frameon=False, ncols=2
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
