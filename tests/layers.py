"""The rules of tests/test_layers.py: what each module of this repository may import and do.

    cli, __main__                                                              9
    server, cluster                                                            8
    llm, follower, llm_arguments, prepare, async_engine, the package's own __init__               7
    build                                                                      6
    device, weights, plan.simulate                                             5
    engine, step_loop, sleep, turns, weights_switch, groups, replicas, multihost   4
    executor, schedule                                                         3
    pages, text, constraints, model, sample                                    2
    plan.capacity, plan.roofline, model_config, rope_config, hf_config, field_checks, sampling_params,
    generation_config, request, echo, score, seeds, stats, config, errors      1
    pallas_kernels                                                             0

Imports go down or stay on a level, never up, and never in a circle; an import inside a function
counts like any other.
"""

import ast
from collections.abc import Collection, Iterator, Mapping

LEVELS = {
    "pallas_kernels": 0,
    "jaxserve.errors": 1,
    "jaxserve.field_checks": 1,
    "jaxserve.field_names": 1,
    "jaxserve.config": 1,
    "jaxserve.request": 1,
    "jaxserve.sampling_params": 1,
    "jaxserve.structured_outputs": 1,
    "jaxserve.generation_config": 1,
    "jaxserve.echo": 1,
    "jaxserve.score": 1,
    "jaxserve.seeds": 1,
    "jaxserve.stats": 1,
    "jaxserve.model_config": 1,
    "jaxserve.rope_config": 1,
    "jaxserve.hf_config": 1,
    "jaxserve.plan": 1,
    "jaxserve.pages": 2,
    "jaxserve.text": 2,
    "jaxserve.constraints": 2,
    "jaxserve.model": 2,
    "jaxserve.sample": 2,
    "jaxserve.executor": 3,
    "jaxserve.schedule": 3,
    "jaxserve.engine": 4,
    "jaxserve.step_loop": 4,
    "jaxserve.sleep": 4,
    "jaxserve.turns": 4,
    "jaxserve.weights_switch": 4,
    "jaxserve.groups": 4,
    "jaxserve.replicas": 4,
    "jaxserve.multihost": 4,
    "jaxserve.multihost.config": 1,
    "jaxserve.device": 5,
    "jaxserve.weights": 5,
    "jaxserve.plan.simulate": 5,
    "jaxserve.build": 6,
    "jaxserve.llm": 7,
    "jaxserve.follower": 7,
    "jaxserve.llm_arguments": 7,
    "jaxserve.prepare": 7,
    "jaxserve.async_engine": 7,
    "jaxserve.server": 8,
    "jaxserve.cluster": 8,
    "jaxserve.server.__main__": 9,
    "jaxserve.cli": 9,
    "jaxserve.__main__": 9,
}
ROOT_LEVEL = (
    7  # jaxserve/__init__.py: it names the public classes and loads them when they are used
)
SCRIPT_LEVEL = 10

JAX = (
    "pallas_kernels",
    "jaxserve.model",
    "jaxserve.sample",
    "jaxserve.weights",
    "jaxserve.device",
    "jaxserve.build",
)
HTTP = [
    "http",
    "socketserver",
    "aiohttp",
    "fastapi",
    "flask",
    "httpx",
    "requests",
    "sanic",
    "starlette",
    "tornado",
    "urllib3",
    "uvicorn",
    "websockets",
]
# Library -> the modules (and what lies under them) that may import it.
ALLOWED_IN = {
    "jax": JAX,
    "jaxlib": JAX,
    "jax._src": ("pallas_kernels.compat",),
    "flax": ("jaxserve.model",),
    "orbax": ("jaxserve.weights",),
    "tensorstore": ("jaxserve.weights",),
    "absl": ("jaxserve.cli", "jaxserve.__main__", "scripts"),
    "httptools": ("jaxserve.server",),
    "uvloop": ("jaxserve.server",),
    "prometheus_client": ("jaxserve.server",),
    "msgspec": ("jaxserve.server", "jaxserve.async_engine"),
    **dict.fromkeys(HTTP, ("jaxserve.server", "jaxserve.cluster", "scripts.peers")),
    # Formats that run code, frameworks of others, and the tests: nowhere.
    **dict.fromkeys(
        ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"), ()
    ),
    **dict.fromkeys(("torch", "tensorflow", "transformers", "tests"), ()),
}
# Modules that stay without jax although their package may use it: capacity planning reads them.
WITHOUT_JAX = ("pallas_kernels.page_bytes", "pallas_kernels.tpu_smem")
SCRIPTS_MAY_IMPORT = ("torch", "transformers", "tests")  # the oracle makers
DEVICE_SEES_OF_SCHEDULE = ("jaxserve.schedule.batch", "jaxserve.schedule.buckets")
BANNED_CALLS = ("eval", "exec", "__import__")
ENVIRONMENT = ("environ", "environb", "getenv", "putenv", "unsetenv")
MAX_FUNCTION_LINES = 60


def within(module: str, packages: Collection[str]) -> bool:
    """Whether a dotted name is one of the packages or lies under one."""
    return any(module == package or module.startswith(package + ".") for package in packages)


def level(module: str) -> int | None:
    """The level of a module by its longest listed prefix; None if it has no place."""
    if module == "jaxserve":
        return ROOT_LEVEL
    if within(module, ["scripts"]):
        return SCRIPT_LEVEL
    found = [name for name in LEVELS if within(module, [name])]
    return LEVELS[max(found, key=len)] if found else None


def imports(tree: ast.AST, modules: Collection[str]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import; `from a import b` is a.b where that is a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                yield node.lineno, "." * node.level + base
                continue
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield node.lineno, full if full in modules or full in ALLOWED_IN else base


def check_import(module: str, name: str) -> str | None:
    """What is wrong with `module` importing `name`, if anything."""
    if name.startswith("."):
        return f"relative import {name}"
    rules = [library for library in ALLOWED_IN if within(name, [library])]
    if rules:
        library = max(rules, key=len)
        if within(module, ["scripts"]) and library in (*SCRIPTS_MAY_IMPORT, "jax"):
            return None
        if not within(module, ALLOWED_IN[library]) or (library == "jax" and module in WITHOUT_JAX):
            return f"imports {name}, which may be imported by {ALLOWED_IN[library] or 'nobody'}"
    if not within(name, ["jaxserve", "pallas_kernels"]):
        return None
    own, other = level(module), level(name)
    if own is None or other is None:
        return f"{module if own is None else name} has no place among the layers"
    if other > own:
        return f"imports {name}, which lies above it"
    sees_schedule = within(module, ["jaxserve.device"]) and within(name, ["jaxserve.schedule"])
    if sees_schedule and not within(name, DEVICE_SEES_OF_SCHEDULE):
        return f"imports {name}; device sees of schedule only batch and buckets"
    return None


def num_code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring, which states the contract and may be long."""
    length = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function) is None:
        return length
    text = function.body[0]
    return length - ((text.end_lineno or text.lineno) - text.lineno + 1)


def check_code(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, fault) for code that is banned wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else None
            if name in BANNED_CALLS:
                yield node.lineno, f"calls {name}()"
            for keyword in node.keywords:
                is_false = isinstance(keyword.value, ast.Constant) and not keyword.value.value
                if keyword.arg == "allow_pickle" and not is_false:
                    yield node.lineno, "allows pickle"
        elif isinstance(node, ast.Attribute):
            if (
                isinstance(node.value, ast.Name)
                and node.value.id == "os"
                and node.attr in ENVIRONMENT
            ):
                yield node.lineno, f"reads the environment: os.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            for alias in node.names:
                if alias.name in ENVIRONMENT:
                    yield node.lineno, f"reads the environment: os.{alias.name}"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = num_code_lines(node)
            if length > MAX_FUNCTION_LINES:
                yield (
                    node.lineno,
                    f"{node.name}() has {length} lines, more than {MAX_FUNCTION_LINES}",
                )


def faults(module: str, source: str, modules: Collection[str] = ()) -> list[str]:
    """Every broken rule of one module, as "module:line: what".

    Args:
        module: its dotted name; "scripts.NAME" for a script.
        source: its text.
        modules: the dotted names of all modules, to tell `from package import module` from a name.
    """
    tree = ast.parse(source)
    found = []
    num_lines = source.count("\n")
    max_lines = 600 if within(module, ["pallas_kernels"]) else 400
    if num_lines > max_lines:
        found.append(f"{module}:1: has {num_lines} lines, more than {max_lines}")
    if level(module) is None:
        found.append(f"{module}:1: has no place among the layers")
    for line, name in imports(tree, modules):
        fault = check_import(module, name)
        if fault:
            found.append(f"{module}:{line}: {fault}")
    is_script = within(module, ["scripts"])
    found += [
        f"{module}:{line}: {fault}"
        for line, fault in check_code(tree)
        if not (is_script and fault.startswith("reads the environment"))
    ]
    return found


def circles(sources: Mapping[str, str]) -> list[list[str]]:
    """Import circles, each as the list of its modules; imports inside functions count.

    Args:
        sources: dotted name -> text of every module.
    """
    graph = {
        module: {name for _, name in imports(ast.parse(text), sources) if name in sources}
        for module, text in sources.items()
    }
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append(path[path.index(module) :])
            return
        if module in done:
            return
        for name in sorted(graph[module]):
            visit(name, [*path, module])
        done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return found
