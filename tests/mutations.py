"""Plant twelve classic faults of attribution libraries, one at a time, and see the tests fail.

    python tests/mutations.py                     all of them, some minutes
    python tests/mutations.py --only sign_flip    one of them
    python tests/mutations.py --list              what they are

Each fault is a replacement of exact source text in a temporary copy of the repository; the working tree is never
written.  The tests named for a fault run on the sound copy first and must pass, then on the faulty one, where each of
them must fail (of a file, or of a test with parameters, some).  Exit code 1: a test does not notice the fault, the
source text is not there exactly once, or tests cannot run; then sharpen the test, or bring the fault up to date.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("attrax", "core", "methods", "frontends", "tests")


@dataclass(frozen=True)
class Mutation:
    """A fault.

    Attributes:
        name: What to call it.
        fault: What it does.
        file: Where, from the root of the repository.
        source: The sound text, there exactly once.
        planted: The faulty text.
        tests: Files or ids of the tests that are to fail.
    """

    name: str
    fault: str
    file: str
    source: str
    planted: str
    tests: tuple[str, ...]


LAYERS, CASES = "tests/core/test_layers.py", "tests/test_cases"
SELECTION = "tests/frontends/test_selection"
MUTATIONS = (
    Mutation(
        "cross_use_terms",
        "products of a weight used twice lack the cross terms of its uses",
        "core/products.py",
        "        for j, v in enumerate(right):\n",
        "        for j, v in enumerate(right):\n"
        "            if len(left) == len(right) and i != j:\n                continue\n",
        (
            "tests/core/test_products.py::test_gram_leaf_is_the_inner_product_of_the_gradients",
            "tests/core/test_products.py::test_squared_norms_are_those_of_the_gradients",
            f"{CASES}.py::test_k04_b15_tied_embedding_and_head",
        ),
    ),
    Mutation(
        "examples_for_tokens",
        "a token mean whose examples are removed is rescaled by the number of examples instead of tokens",
        "frontends/loop/selection.py",
        '    if denominator == "examples":\n',
        "    if denominator:\n",
        (
            f"{SELECTION}.py::test_a_token_mean_counts_the_kept_tokens",
            f"{SELECTION}.py::test_an_unmodified_trainer",
        ),
    ),
    Mutation(
        "counts_of_one_process",
        "removal rescales by what its own process keeps, not by what all keep",
        "frontends/loop/selection.py",
        "    counts = summed(_counts(sizes, kept, layers).to(device), over).cpu()\n",
        "    counts = _counts(sizes, kept, layers)\n",
        (f"{SELECTION}_distributed.py",),
    ),
    Mutation(
        "removal_after_clipping",
        "examples are removed when the optimizer steps, from a gradient that was clipped with them in it",
        "frontends/loop/capture.py",
        "            for callback in self.after_backward:\n                callback(event)\n",
        "            self.before_step = (lambda _: [f(event) for f in self.after_backward],)\n",
        (f"{SELECTION}.py::test_a_loss_that_is_scaled", f"{SELECTION}.py::test_clipping_comes_after"),
    ),
    Mutation(
        "epsilon_outside",
        "epsilon of a norm is added to the root instead of under it",
        "core/layers/norm.py",
        "    return centered * (centered.square().mean(axes, keepdim=True) + eps).rsqrt()\n",
        "    return centered / (centered.square().mean(axes, keepdim=True).sqrt() + eps)\n",
        (
            f"{LAYERS}::test_every_configuration_gives_the_gradients_of_autograd[norms]",
            f"{CASES}.py::test_k04_b18_one_norm_in_two_places",
            f"{CASES}_data.py::test_k10_b44_convolutions[group_norm]",
        ),
    ),
    Mutation(
        "patch_order",
        "patches of a convolution put places before channels",
        "core/layers/convolution.py",
        "    return windows.reshape(B, groups, channels * prod(kernel), prod(places)).transpose(2, 3)\n",
        "    windows = windows.movedim(2, 2 + len(kernel))\n"
        "    return windows.reshape(B, groups, channels * prod(kernel), prod(places)).transpose(2, 3)\n",
        (
            f"{LAYERS}::test_convolutions_give_the_gradients_of_autograd",
            f"{CASES}_data.py::test_k10_b44_convolutions",
        ),
    ),
    Mutation(
        "symmetric_same",
        'padding="same" of an even kernel is as wide on the left as on the right',
        "core/layers/convolution.py",
        "for margin in (total // 2, total - total // 2)]",
        "for margin in (total - total // 2, total - total // 2)]",
        (
            f"{LAYERS}::test_convolutions_give_the_gradients_of_autograd",
            f"{CASES}_data.py::test_k10_b44_convolutions[even_same]",
        ),
    ),
    Mutation(
        "kronecker_order",
        "the spectrum of K-FAC is A x C instead of C x A, in the right shape",
        "core/kronecker.py",
        "torch.cat([torch.outer(lg, basis.la) for lg in basis.lg])",
        "torch.cat([torch.outer(basis.la, lg).reshape(len(lg), -1) for lg in basis.lg])",
        (
            "tests/core/test_kronecker.py::test_kfac_inverts_the_dense_kronecker_product",
            "tests/methods/test_kfac.py::test_scores_are_those_of_the_dense_curvature",
            f"{CASES}_scores.py::test_k13_b62_damping_is_added_once",
        ),
    ),
    Mutation(
        "mean_of_means",
        "second moments of two parts are averaged as means, whatever their numbers of examples",
        "core/kronecker.py",
        "    return Spectrum(x.total + y.total, x.examples + y.examples)\n",
        "    n = x.examples + y.examples\n"
        "    return Spectrum((x.total / x.examples + y.total / y.examples) * n / 2, n)\n",
        (
            "tests/core/test_kronecker.py::test_the_spectrum_does_not_depend_on_split_form_or_memory",
            "tests/methods/test_kfac.py::test_fits_do_not_depend_on_blocks",
            f"{CASES}_data.py::test_k17_b81_a_batch_without_examples",
        ),
    ),
    Mutation(
        "norms_of_shards",
        "the squared norm of a gradient is the sum of those of its shards, one for each position",
        "core/products.py",
        'TWIN = {"t": "s"}\n',
        "TWIN: dict[str, str] = {}\n",
        (
            "tests/core/test_products.py::test_squared_norms_are_those_of_the_gradients",
            "tests/methods/test_similarity.py::test_gradcos_divides_by_norms_over_all_leaves_once",
            f"{CASES}_scores.py::test_k10_b43_norms_of_biases_over_positions",
        ),
    ),
    Mutation(
        "sign_flip",
        "positive scores are harmful",
        "methods/pairwise.py",
        "        values.append(value)\n",
        "        values.append(-value)\n",
        (
            "tests/methods/test_similarity.py::test_graddot_is_the_inner_product_of_the_gradients",
            "tests/methods/test_kfac.py::test_scores_predict_the_loss_after_removal",
            f"{CASES}_scores.py::test_k15_b69_positive_scores_are_helpful",
        ),
    ),
    Mutation(
        "push_of_another_step",
        "a step is credited with gradients it did not take: without their loss weights (nothing here clips)",
        "methods/tracin.py",
        "        for examples, value in row_sums(measure, targeted(source, target)):\n",
        '        for examples, value in row_sums(measure, targeted(source, "sum")):\n',
        ("tests/methods/test_tracin.py::test_examples_are_weighed_as_their_step_did_and_queries_are_not",),
    ),
)


@dataclass(frozen=True)
class Outcome:
    """What became of a fault: the tests that failed, or why it counts as an error."""

    failed: tuple[str, ...]
    error: str = ""


def run_tests(copy: Path, tests: Sequence[str]) -> tuple[int, tuple[str, ...], str]:
    """Exit code of pytest, ids of the tests that failed, and its output."""
    environment = os.environ | {
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    lines = [x for x in done.stdout.splitlines() if x.startswith(("FAILED ", "ERROR "))]
    return done.returncode, tuple(x.split()[1] for x in lines), done.stdout + done.stderr


def plant(mutation: Mutation, copy: Path) -> Outcome:
    """Plant a fault, run its tests, and take it out again."""
    path = copy / mutation.file
    sound = path.read_text()
    found = sound.count(mutation.source)
    if found != 1:
        return Outcome((), f"the source text is {found} times in {mutation.file}; expected once")
    try:
        path.write_text(sound.replace(mutation.source, mutation.planted))
        code, failed, output = run_tests(copy, mutation.tests)
    finally:
        path.write_text(sound)
    if code not in (0, 1):
        return Outcome((), f"pytest ended with {code}: {output.strip().splitlines()[-1]}")
    noticed = {part for found in failed for part in (found, found.split("[")[0], found.split("::")[0])}
    passed = [test for test in mutation.tests if test not in noticed]
    return Outcome(failed, f"SURVIVES {', '.join(passed)}" if passed else "")


def copied(folder: Path) -> Path:
    """The repository without history, caches and results."""
    copy = folder / "repository"
    ignore = shutil.ignore_patterns("__pycache__", ".*")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def table(outcomes: dict[str, Outcome]) -> str:
    """A row for each fault: how many tests failed in which functions."""
    rows: list[str] = []
    for name, outcome in outcomes.items():
        functions = dict.fromkeys(test.split("::")[1].split("[")[0] for test in outcome.failed)
        rows.append(f"{name:22} {outcome.error or f'{len(outcome.failed)} failed'}")
        rows += [f"{'':22}   {function}" for function in functions]
    return "\n".join(rows)


def main() -> int:
    names = [m.name for m in MUTATIONS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="NAME", help="these faults only"
    )
    parser.add_argument("--list", action="store_true", help="say what the faults are, and stop")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if m.name in options.only]
    if options.list:
        for m in chosen:
            print(f"{m.name:22} {m.fault}\n{'':22}   {m.file}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        copy, start = copied(Path(folder)), time.monotonic()
        print("sound: every test that is to fail later must pass now", flush=True)
        code, failed, output = run_tests(copy, sorted({test for m in chosen for test in m.tests}))
        if code != 0:
            print(f"{output}\nThe tests do not pass without a fault: {', '.join(failed)}")
            return 1
        outcomes: dict[str, Outcome] = {}
        for k, m in enumerate(chosen, 1):
            print(f"[{time.monotonic() - start:4.0f} s] {k}/{len(chosen)} {m.name}: {m.fault}", flush=True)
            outcomes[m.name] = plant(m, copy)
            print(
                f"         {outcomes[m.name].error or f'{len(outcomes[m.name].failed)} failed'}", flush=True
            )
    print(f"\n{table(outcomes)}\n\n{time.monotonic() - start:.0f} s")
    return int(any(outcome.error for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
