"""The rules of the code base that no run would show: who may import whom, and who writes recurrent state."""

import ast
import importlib.util
import pathlib
import sys

import pytest

ROOT = pathlib.Path(importlib.util.find_spec("mamba_spec_jax").origin).parent.parent
LIBRARY = sorted(path for package in ("mamba_spec_jax", "pallas_kernels") for path in (ROOT / package).rglob("*.py"))
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in LIBRARY}

# What each part of mamba_spec_jax may import of it, itself included.
MAY_IMPORT = {
    "modes": {"modes"},
    "array_types": {"array_types"},
    "cache": {"cache", "modes", "array_types"},
    "attention": {"attention", "cache", "modes", "array_types"},
    "layers": {"layers", "cache", "modes", "array_types"},
    "progress_bar": {"progress_bar"},
    "models": {"models", "attention", "layers", "cache", "modes", "array_types", "progress_bar"},
    "speculative": {"speculative", "attention", "layers", "cache", "modes", "array_types", "progress_bar"},
    "assets": {"assets"},
    "text_generation": {"models", "speculative"},
    "loaded": {"text_generation", "models", "modes"},
    "drafting": {"loaded", "text_generation", "models", "speculative"},
    "cli": {
        "cli",
        "loaded",
        "text_generation",
        "drafting",
        "assets",
        "models",
        "speculative",
        "attention",
        "layers",
        "cache",
        "modes",
        "array_types",
        "",
    },
    "": {
        "loaded",
        "text_generation",
        "drafting",
        "models",
        "speculative",
        "attention",
        "layers",
        "cache",
        "modes",
        "array_types",
    },
}
# What may be imported from outside, the standard library apart.
LIBRARIES = {
    "jax",
    "jaxlib",
    "flax",
    "numpy",
    "jaxtyping",
    "ml_dtypes",
    "safetensors",
    "huggingface_hub",
    "jinja2",
    "tokenizers",
    "rich",
}
POOLS = {"mamba", "ssm", "conv", "ring"}  # what a cache calls them
STATE = POOLS - {"mamba"}
OF_THE_COMMAND_LINE = {"typer", "matplotlib"}


def imported(name: str):
    """Absolute names of everything a file imports, wherever in it."""
    package = name.removesuffix("/__init__.py").removesuffix(".py").split("/")
    if not name.endswith("__init__.py"):
        package = package[:-1]
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from package import module` imports the module.
            yield from (f"{module}.{alias.name}" for alias in node.names)


def part_of(module: str) -> str:
    """The part of mamba_spec_jax a module is in; "" is the package itself, its public names."""
    names = module.split(".")[1:]
    return names[0] if names and names[0] in MAY_IMPORT else ""


@pytest.mark.parametrize("name", [name for name in TREES if name.startswith("mamba_spec_jax/")])
def test_imports_go_downward(name):
    part = part_of(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    for module in imported(name):
        top = module.split(".")[0]
        if top == "mamba_spec_jax":
            assert part_of(module) in MAY_IMPORT[part], f"{name} imports {module}"
        elif top != "pallas_kernels":
            allowed = LIBRARIES | (OF_THE_COMMAND_LINE if part == "cli" else set())
            assert top in sys.stdlib_module_names or top in allowed, f"{name} imports {module}"


@pytest.mark.parametrize("name", [name for name in TREES if name.startswith("pallas_kernels/")])
def test_the_kernels_stand_alone(name):
    for module in imported(name):
        top = module.split(".")[0]
        assert top in {"jax", "numpy", "pallas_kernels"} or top in sys.stdlib_module_names, f"{name} imports {module}"


def test_every_part_is_known():
    directory = ROOT / "mamba_spec_jax"
    parts = {path.stem for path in directory.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert parts - {"__init__", "__main__"} == set(MAY_IMPORT) - {""}


@pytest.mark.parametrize("name", list(TREES))
def test_no_asserts_on_user_paths(name):
    """`python -O` drops them, and their messages name neither what came nor what was expected."""
    lines = [node.lineno for node in ast.walk(TREES[name]) if isinstance(node, ast.Assert)]
    assert not lines, f"{name}: assert at lines {lines}"


@pytest.mark.parametrize("path", LIBRARY, ids=list(TREES))
def test_files_answer_one_question(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 400


def writes_of_pools(tree: ast.AST):
    """Functions that make a pool, or another one of it: where recurrent state can change."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
            makes = any(isinstance(call.func, ast.Name) and call.func.id == "MambaPool" for call in calls)
            replaces = any(
                ast.unparse(call.func) == "dataclasses.replace" and {keyword.arg for keyword in call.keywords} & STATE
                for call in calls
            )
            if makes or replaces:
                yield node.name


def test_recurrent_state_is_written_in_few_places():
    """Created, cleared, advanced by a pass without a record, committed, and moved from a ring into the states."""
    found = {
        name: sorted(writes_of_pools(tree)) for name, tree in TREES.items() if name.startswith("mamba_spec_jax/")
    }  # fmt: skip
    assert {name: functions for name, functions in found.items() if functions} == {
        "mamba_spec_jax/cache/pools.py": ["create"],
        "mamba_spec_jax/cache/slots.py": ["reset_slots"],
        "mamba_spec_jax/attention/recurrence.py": [
            "_settle",  # before a pass without a record
            "_verify",  # REPLAY: inputs behind the history, and a full history into the state, which is the same to all
            "_write_folded",  # of `materialize`, and of the commit for tracked slots
            "commit",
            "forward",
            "materialize",
        ],
    }


def test_drafters_change_recurrent_state_by_the_commit_alone():
    """They hand pools on, as part of a cache, and never name one as something to be replaced."""
    speculative = {name: tree for name, tree in TREES.items() if name.startswith("mamba_spec_jax/speculative/")}
    replaced = {
        name: sorted({keyword.arg for keyword in ast.walk(tree) if isinstance(keyword, ast.keyword)} & POOLS)
        for name, tree in speculative.items()
    }
    assert not {name: names for name, names in replaced.items() if names}
    commits = {
        name for name, tree in speculative.items() for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "update_mamba_state_after_mtp_verify"
    }  # fmt: skip
    assert commits == {"mamba_spec_jax/speculative/decoder.py", "mamba_spec_jax/speculative/drafters/draft_model.py"}


def test_a_pass_with_a_record_writes_no_state_under_snapshot():
    """In the layer's verify the pool is another one where there is a ring, and only there."""
    (verify,) = (
        node
        for node in ast.walk(TREES["mamba_spec_jax/attention/recurrence.py"])
        if isinstance(node, ast.FunctionDef) and node.name == "_verify"
    )
    snapshot, *replay = verify.body
    assert isinstance(snapshot, ast.If)
    assert ast.unparse(snapshot.test) == "pool.ring is None"
    assert isinstance(snapshot.body[-1], ast.Return), "what follows is REPLAY's alone"

    def assigns_pool(statements):
        return any(
            isinstance(target, ast.Name) and target.id == "pool"
            for statement in statements
            for node in ast.walk(statement)
            if isinstance(node, ast.Assign)
            for target in node.targets
        )

    assert not assigns_pool(snapshot.body)
    assert assigns_pool(replay)
