"""What kept programs are told apart by."""

import ast
import dataclasses
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxserve.device import program_identity
from jaxserve.device.placement import Placement
from jaxserve.device.program_identity import (
    NEVER_TRACED,
    PACKAGES,
    describe,
    identity,
    source_digest,
    source_files,
)
from jaxserve.device.programs import lower_traced
from tests.device.executors import shared_pages
from tests.layers import imports
from tests.test_layers import MODULES, REPOSITORY, module_name


@pytest.fixture(scope="module")
def shapes():
    return shared_pages("auto")._shapes


def test_it_is_the_same_again(shapes):
    assert identity(shapes) == identity(dataclasses.replace(shapes))


def test_model_kernel_and_shapes_are_in_it(shapes):
    model = shapes.model
    other_config = dataclasses.replace(model.config, rms_norm_eps=0.25)
    other_kernel = dataclasses.replace(model.kernel, backend="reference")
    others = [
        dataclasses.replace(shapes, num_pages=shapes.num_pages + 1),
        dataclasses.replace(shapes, model=dataclasses.replace(model, config=other_config)),
        dataclasses.replace(shapes, model=dataclasses.replace(model, kernel=other_kernel)),
    ]
    assert len({identity(one) for one in [shapes, *others]}) == 4


def test_how_many_devices_share_a_model_is_in_it_but_not_which(shapes):
    def mesh(size: int, axis: str) -> AbstractMesh:
        return AbstractMesh((size,), (axis,), axis_types=(AxisType.Auto,))

    kernels = [
        dataclasses.replace(shapes.model.kernel, mesh=mesh(size, axis), axis=axis)
        for size, axis in ((2, "model"), (4, "model"), (4, "tp"))
    ]
    assert len({describe(one) for one in [shapes.model.kernel, *kernels]}) == 4
    device = jax.devices()[0]
    one, other = (Placement(mesh=Mesh([device], (axis,))) for axis in ("a", "b"))
    texts = [describe(one), describe(other), describe(Placement())]
    assert len(set(texts)) == 3
    assert not any(f"id={device.id}" in text for text in texts)


def test_settings_of_jax_and_versions_are_in_it(shapes, monkeypatch):
    before = identity(shapes)
    with jax.default_matmul_precision("float32"):
        assert identity(shapes) != before
    monkeypatch.setattr(program_identity, "version", lambda name: f"{name} 99")
    assert identity(shapes) != before


def test_what_was_built_is_in_it(shapes, monkeypatch):
    before = identity(shapes)
    monkeypatch.setattr(program_identity, "missing", lambda: "nothing was built here")
    assert identity(shapes) != before


def test_an_edit_of_the_source_changes_it(tmp_path):
    def written(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return source_digest([tmp_path])

    digests = [
        written("a.py", "x = 1\n"),
        written("a.py", "x = 2\n"),
        written("b.py", ""),
    ]
    (tmp_path / "b.py").rename(tmp_path / "c.py")
    digests.append(source_digest([tmp_path]))
    assert len(set(digests)) == 4
    assert written("notes.txt", "no code") == digests[-1]


def test_an_edit_of_what_is_never_traced_changes_nothing(tmp_path):
    def written(name: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        return source_digest([tmp_path])

    before = written("model/a.py")
    assert all(written(name) == before for name in ("server/a.py", "cli/b/c.py", "engine.py"))
    assert written("device/server/a.py") != before
    assert written("new/a.py") != before, "what nobody has thought of counts"


def read_sources() -> set[Path]:
    return {path for package in PACKAGES for path in source_files(package)}


def test_both_packages_are_read():
    names = {module_name(path) for path in read_sources()}
    assert {"jaxserve", "jaxserve.model.llama", "jaxserve.device.step", "jaxserve.config"} <= names
    assert {name for name in MODULES if name.startswith("pallas_kernels")} <= names
    there = {path.name for path in PACKAGES[0].iterdir()}
    assert there >= NEVER_TRACED - {"cluster"}


def reached(modules: dict[str, str]) -> set[str]:
    """Modules that a function of a program may call into, by their imports: those that make a
    `Program`, and what they import, and so on."""
    makes = ("Program(", "shapes.program(")
    todo = [n for n, text in modules.items() if any(m in text for m in makes) and "device" in n]
    found: set[str] = set()
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += {one for _, one in imports(ast.parse(modules[name]), modules) if one in modules}
    return found


def test_all_that_programs_import_is_read():
    names = {module_name(path) for path in read_sources()}
    found = reached(MODULES)
    assert {"jaxserve.device.step_shapes", "jaxserve.device.page_moves"} <= found
    assert {"jaxserve.model.rope", "jaxserve.sample.filters", "pallas_kernels.dispatch"} <= found
    assert found <= names
    # The control: an import of what is never traced, in a function even.
    step = MODULES["jaxserve.device.step"] + "\ndef f():\n    import jaxserve.text.watcher\n"
    assert "jaxserve.text.watcher" in reached(MODULES | {"jaxserve.device.step": step}) - names


def test_all_that_runs_in_a_trace_is_read():
    """Imports by name (of the kernels' backends, say) show here alone."""
    ran: set[str] = set()

    def watch(frame, event, argument):
        ran.add(frame.f_code.co_filename)

    programs = {one.key[0]: one for one in shared_pages("auto").list_programs()}
    for program in programs.values():
        jax.clear_caches()  # what was traced before is traced again
        sys.setprofile(watch)
        try:
            lower_traced(program)
        finally:
            sys.setprofile(None)
    ours = {Path(name) for name in ran if name.startswith(tuple(f"{p}/" for p in PACKAGES))}
    assert {"llama.py", "step.py", "sampler.py", "xla.py"} <= {path.name for path in ours}
    assert REPOSITORY / "jaxserve/device/programs.py" in ours
    assert ours <= read_sources()


def test_what_has_no_lasting_description_is_refused():
    with pytest.raises(TypeError, match="function has no lasting description"):
        describe({"a": [lambda: None]})
