"""The router study from the command line: `python -m experiments.router_study`."""

import argparse
from pathlib import Path

import keras

from experiments.lib.runs import check_before, write_json
from experiments.router_study.configurations import STUDIES
from experiments.router_study.figures import plot_curves, plot_study
from experiments.router_study.runner import run_study
from experiments.router_study.scales import SCALES
from experiments.router_study.tables import claims_table, report
from experiments.router_study.transfer import in_words, plot_transfer, transfer
from keras_softmoe.files import atomic_file


def main(arguments=None):
    """Run a study, or go on with it, and write its JSON, tables and figures."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.router_study",
        description="Train the models of the router study, or go on with it, and write "
        "results.json, README.md and figures. The backend is Keras': set "
        "KERAS_BACKEND.",
    )
    parser.add_argument("--scale", choices=SCALES, default="small")
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=[*STUDIES])
    parser.add_argument(
        "--seeds", type=int, nargs="+", help="train these of the scale's seeds only"
    )
    parser.add_argument(
        "--models", nargs="+", help="train these models of the studies only"
    )
    parser.add_argument(
        "--work", type=Path, help="where cells are kept [build/study/SCALE]"
    )
    parser.add_argument(
        "--output", type=Path, help="where results are written [that directory]"
    )
    arguments = parser.parse_args(arguments)
    scale = SCALES[arguments.scale]
    work = arguments.work or Path("build", "study", scale.name)
    output = arguments.output or work
    known = (*scale.rate_seeds, *scale.all_seeds)
    check_before([work, output], arguments.seeds or known, known)
    print(f"{scale.name} on {keras.backend.backend()}, kept in {work}")
    results = run_study(
        scale, work, arguments.studies, arguments.seeds, arguments.models
    )
    write_results(results, output)
    print(f"\n{report(results)}\n{claims_table(results)}\n\nWritten to {output}")


def write_results(results, directory):
    """Write the JSON of a study, and tables and figures that are made of it alone.

    Args:
        results: dict, what `run_study` returns.
        directory: path.
    """
    directory = Path(directory)
    write_json(directory / "results.json", results)
    text = report(results)
    # Figures are of these; side studies have their tables.
    if "routers" in results["studies"]:
        last = f"{results['scale']['shots'][-1]}-shot"
        for metric in ("upstream_accuracy", last):
            name = f"{metric.replace('-', '_')}.png"
            with atomic_file(directory / name) as file:
                plot_study(results, metric).savefig(file)
            text += f"\n![{metric.replace('_', ' ')} against cost]({name})\n"
    curves = [s for s in ("headline", "initial_scale") if s in results["studies"]]
    if curves:
        with atomic_file(directory / "curves.png") as file:
            plot_curves(results, curves).savefig(file)
        text += "\n![accuracy and sharpness while training](curves.png)\n"
    if found := transfer(results):
        with atomic_file(directory / "transfer.png") as file:
            plot_transfer(results).savefig(file)
        text += f"\n## Transfer\n\n{in_words(found)}\n\n"
        text += "![few-shot against upstream accuracy](transfer.png)\n"
    with atomic_file(directory / "README.md") as file:
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
