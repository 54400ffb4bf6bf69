"""The commands of `experiments/README.md` say what they can do."""

import re
import sys

import pytest

from experiments import (
    controls,
    glyph_presets,
    glyph_trials,
    limoe_presets,
    limoe_sweeps,
    upload_presets,
)
from experiments.letters import __main__ as letters, answers
from experiments.pages import __main__ as pages
from experiments.real_weights import __main__ as real_weights, any_model, dinov2
from experiments.router_study import __main__ as router_study
from experiments.upcycling import __main__ as upcycling

COMMANDS = [
    answers,
    controls,
    glyph_presets,
    glyph_trials,
    letters,
    limoe_presets,
    limoe_sweeps,
    pages,
    any_model,
    dinov2,
    real_weights,
    router_study,
    upcycling,
    upload_presets,
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
def test_help(command, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["command", "--help"])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == 0
    assert re.search(r"usage: .*options:", capsys.readouterr().out, flags=re.DOTALL)
