"""Ratios, files and tables of the benchmarks; nothing here depends on a backend."""

import importlib
import json
import pathlib

import pytest

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    """Callable from the name of a benchmark to its module."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.fixture
def runner(benchmark, monkeypatch, tmp_path):
    """Callable that measures made-up sections and returns what is in the file."""
    run = benchmark("run")
    monkeypatch.setattr(run.report, "machine", lambda: {"backend": "jax 1"})
    file = tmp_path / "results.json"

    def measure(options=(), **sections):
        monkeypatch.setattr(run, "SECTIONS", sections)
        run.main(["--json", str(file), *options])
        return content()

    def content():
        assert [path.name for path in tmp_path.iterdir()] == [file.name]
        return json.loads(file.read_text(encoding="utf-8"))

    measure.content = content
    return measure


def row(name="soft_128x1", kind="forward", **ratios):
    """A row of results, with ratios to rivals."""
    return {
        "name": name,
        "pass": kind,
        "ours": "layer",
        "rounds": 3,
        "ms": {"layer": 1234.5, **dict.fromkeys(ratios, 1.0)},
        "first_call_s": {"layer": 2.5, **dict.fromkeys(ratios, 7.0)},
        "ratios": {
            rival: {"median": ratio, "min": ratio - 0.25, "max": ratio + 0.5}
            for rival, ratio in ratios.items()
        },
    }


def results(backend, accelerator=None, dtype="float32", **sections):
    """The content of a file of results."""
    machine = {"backend": f"{backend} 1.0", "accelerator": accelerator, "dtype": dtype}
    return {
        "machine": machine,
        "shapes": "paper",
        "jit_compile": False,
        "rivals": {"keras-hub": {"version": "0.1", "differs": "Another GELU."}},
        "sections": sections,
    }


@pytest.fixture
def cells_of(benchmark, tmp_path):
    """Callable from contents of files to dict from first cells to the other cells."""
    tables = benchmark("tables")

    def cells(heading, *contents):
        files = []
        for index, content in enumerate(contents):
            files.append(tmp_path / f"{index}.json")
            files[-1].write_text(json.dumps(content), encoding="utf-8")
        output = tmp_path / "RESULTS.md"
        tables.main([*map(str, files), "--output", str(output)])
        text = output.read_text(encoding="utf-8")
        (part,) = (p for p in text.split("\n## ") if p.startswith(heading))
        lines = [line for line in part.splitlines() if line.startswith("|")]
        split = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
        assert len({len(line) for line in split}) == 1
        return {tuple(line[: -len(contents)]): line[-len(contents) :] for line in split}

    return cells


def test_contests_take_turns(benchmark):
    timing = benchmark("timing")
    calls = []
    steps = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    first_call, seconds = timing.contest(steps, timing.Patience(rounds=4))
    # A first call, one to settle, and four rounds.
    assert calls == ["a", "b"] * 6
    assert list(first_call) == list(seconds) == ["a", "b"]
    assert [len(times) for times in seconds.values()] == [4, 4]


@pytest.mark.parametrize(("rounds", "expected"), [(1, 1), (3, 3), (100, 3)])
def test_contests_out_of_time_still_have_three_rounds(benchmark, rounds, expected):
    timing = benchmark("timing")
    calls = []
    patience = timing.Patience(rounds, seconds=0.0)
    _, seconds = timing.contest({"a": lambda: calls.append("a")}, patience)
    assert len(seconds["a"]) == expected
    # The first call, and none to settle.
    assert len(calls) == 1 + expected


def test_ratios_are_taken_within_rounds(benchmark):
    first_call = {"layer": 5.0, "dense": 6.0, "products": 7.0}
    seconds = {
        "layer": [2.0, 8.0, 3.0],
        "dense": [1.0, 2.0, 3.0],
        "products": [2.0, 2.0, 2.0],
    }
    result = benchmark("timing").summarize(
        first_call, seconds, "layer", ["dense", "products"]
    )
    assert result == {
        "ours": "layer",
        "rounds": 3,
        "ms": {"layer": 3000.0, "dense": 2000.0, "products": 2000.0},
        "first_call_s": first_call,
        "ratios": {
            # Medians of rounds: 2 2 2 over 1 2 3.
            "dense": {"median": 2.0, "min": 1.0, "max": 4.0, "products": 1.0},
            "products": {"median": 1.5, "min": 1.0, "max": 4.0},
        },
    }


def test_what_was_measured_survives_a_failure(runner):
    def fail(options):
        raise RuntimeError("no memory left")

    with pytest.raises(RuntimeError, match="no memory left"):
        runner(layers=lambda options: [row(dense=1.5)], models=fail)
    assert runner.content()["sections"] == {"layers": [row(dense=1.5)]}


def test_sections_that_are_left_out_stay(runner):
    both = {"layers": lambda options: [row(dense=1.5)], "models": lambda options: []}
    runner(**both)
    both["layers"] = lambda options: [row(dense=9.0)]
    content = runner(["--sections", "models"], **both)
    assert content["sections"]["layers"] == [row(dense=1.5)]
    # Under other conditions they would be compared with what they cannot be.
    content = runner(["--sections", "models", "--shapes", "paper"], **both)
    assert content["sections"] == {"models": []}


def test_memory_comes_from_processes_of_their_own(benchmark, monkeypatch):
    memory, report = benchmark("memory"), benchmark("report")
    commands = []

    def run(command, **kwargs):
        commands.append(command)
        process = memory.subprocess.CompletedProcess(command, 0)
        process.stdout = '{"weights_mb": 1.0, "peak_mb": 3.0, "on_device": false}'
        return process

    monkeypatch.setattr(memory.subprocess, "run", run)
    options = report.command_line("Memory.", ["paper"]).parse_args([])
    rows = report.shown(memory.measure_all(options))
    assert [row["name"] for row in rows] == [
        "dense_twin",
        "soft_moe",
        "soft_moe_remat",
    ]
    assert all(row["peak_mb"] == 3.0 for row in rows)
    # Two of them side by side, in either order.
    asked = sorted(command[2:4] for command in commands)
    assert asked == sorted(["--variant", row["name"]] for row in rows)


def test_a_failure_to_train_is_no_figure(benchmark, monkeypatch):
    memory, report = benchmark("memory"), benchmark("report")
    monkeypatch.setattr(memory.sys, "executable", "false")
    options = report.command_line("Memory.", ["paper"]).parse_args([])
    with pytest.raises(RuntimeError, match="dense_twin has failed"):
        list(memory.measure_all(options))


def test_targets_that_are_missed_are_bold(cells_of):
    cells = cells_of(
        "Targets",
        results("jax", layers=[row(products=1.2)]),
        results("torch", layers=[row(products=1.2, **{"soft-moe-pytorch": 0.75})]),
    )
    heads, _, *rows = cells.items()
    assert heads[1] == ["JAX", "PyTorch"]
    wanted = "JAX 1.15, TensorFlow 1.25, PyTorch 1.25"
    layer = "Soft MoE layer, 128 experts x 1 slot"
    assert rows == [
        (
            (layer, "products", "forward", wanted),
            ["**1.20 (0.95 to 1.70)**", "1.20 (0.95 to 1.70)"],
        ),
        ((layer, "soft-moe-pytorch", "forward", "0.77"), ["", "0.75 (0.50 to 1.25)"]),
    ]


def test_a_miss_says_what_the_products_alone_take(cells_of):
    missed = row(products=1.2, **{"soft-moe-pytorch": 0.9})
    missed["ratios"]["soft-moe-pytorch"]["products"] = 0.8
    cells = cells_of("Targets", results("torch", layers=[missed]))
    _, _, _, (_, of_package) = cells.items()
    assert of_package == ["**0.90 (0.65 to 1.40)**, products 0.80"]


def test_scaling_is_as_good_as_its_worst(cells_of):
    rows = [row(f"{n} experts", fewest=ratio) for n, ratio in ((4, 1.5), (8, 1.0))]
    cells = cells_of("Targets", results("tensorflow", "H200", "bfloat16", scaling=rows))
    heads, _, (_, measured) = cells.items()
    assert heads[1] == ["TensorFlow, H200, bfloat16"]
    assert measured == ["**1.50 (1.25 to 2.00)**"]


def test_everything_timed_is_in_a_table(cells_of):
    both = [row("dense_vit", "fit", hub=0.5, other=2.0)]
    one = [row("dense_vit", "fit", hub=1.0)]
    contents = results("torch", models=both), results("jax", models=one)
    cells = cells_of("Everything", *contents)
    assert cells["dense_vit", "fit", "hub"] == [
        "1,234.5 ms, 0.50 (0.25 to 1.00)",
        "1,234.5 ms, 1.00 (0.75 to 1.50)",
    ]
    assert cells["dense_vit", "fit", "other"] == ["1,234.5 ms, 2.00 (1.75 to 2.50)", ""]
    cells = cells_of("First calls", *contents)
    assert cells["dense_vit", "fit", "other"] == ["2.5 / 7.0", ""]


def test_memory_is_compared_with_the_first_variant(cells_of):
    rows = [
        {"name": "dense_twin", "pass": "fit", "weights_mb": 90.0, "peak_mb": 1000.0},
        {"name": "soft_moe", "pass": "fit", "weights_mb": 3700.0, "peak_mb": 8000.0},
    ]
    cells = cells_of("Memory", results("jax", memory=rows))
    assert cells["soft_moe",] == ["8,000 MB, 8.00 (weights 3,700 MB)"]
    assert cells["dense_twin",] == ["1,000 MB, 1.00 (weights 90 MB)"]


def test_the_reader_learns_what_differs(benchmark, tmp_path):
    file = tmp_path / "results.json"
    file.write_text(json.dumps(results("jax")), encoding="utf-8")
    tables = benchmark("tables")
    text = tables.markdown(tables.read([file]))
    assert "- `keras-hub`: Another GELU." in text
    assert "rivals keras-hub 0.1" in text


def test_tables_need_results(benchmark, monkeypatch, tmp_path, capsys):
    tables = benchmark("tables")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    with pytest.raises(SystemExit):
        tables.main([])
    assert "make bench" in capsys.readouterr().err


def test_the_page_has_the_measured_numbers(benchmark):
    """Every number in it comes from the files of results."""
    tables = benchmark("tables")
    text = (BENCHMARKS.parent / "docs" / "results" / "speed.md").read_text(
        encoding="utf-8"
    )
    files = sorted(tables.RESULTS.glob("*.json"))
    assert len(files) >= 3
    assert tables.page(text, tables.read(files)) == text
    results = (BENCHMARKS / "RESULTS.md").read_text(encoding="utf-8")
    assert tables.markdown(tables.read(files)) == results


def test_the_page_of_where_time_goes_has_the_measured_numbers(benchmark):
    tables, where = benchmark("tables"), benchmark("where")
    file = BENCHMARKS.parent / "docs" / "results" / "where_time_goes.md"
    results = tables.read(sorted(where.RESULTS.glob("*.json")))
    text = file.read_text(encoding="utf-8")
    assert "2.15 (2.09 to 2.19)" in text
    assert where.page(text, results) == text


def test_a_page_without_a_place_for_tables(benchmark):
    with pytest.raises(ValueError, match="must have once"):
        benchmark("tables").page("# Title", [])
