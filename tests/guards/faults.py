"""Faults of one line, planted one at a time: each must turn a test red.

`KERAS_BACKEND=torch python -m tests.guards.faults` plants each in a copy of the library
and runs the tests that should see it, until the first one fails. It prints a line for
each fault, and fails if a fault stays unseen. Give names to plant only these.

That every fault is still in place, with its text found once, is a test of every suite.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "keras_softmoe"


class Fault(NamedTuple):
    """A line and its faulty form.

    Attributes:
        name: str.
        line: str, text that the library contains once, in whichever file.
        planted: str, the text that takes its place.
        tests: str, paths of tests below `tests`, the likeliest first.
    """

    name: str
    line: str
    planted: str
    tests: str

    def path(self, package=PACKAGE):
        """Path of the only file with this line."""
        texts = {path: path.read_text("utf-8") for path in package.rglob("*.py")}
        found = [path for path, text in texts.items() if self.line in text]
        counts = [texts[path].count(self.line) for path in found]
        if counts != [1]:
            raise ValueError(
                f"The line of the fault '{self.name}' must occur once. Received: "
                f"{[path.name for path in found]}. Take the line as it is now."
            )
        return found[0]


ASSIGNMENT = "ops/test_assignment.py routers/test_sparse.py"
ROUTING = "ops/test_routing.py layers/test_moe.py"
LOSSES = "ops/test_router_losses.py reference/test_reference_ops.py"
ENTROPY = "ops/test_router_losses.py reference/test_reference_ops.py"
TRANSPORT = "ops/test_transport.py reference/test_reference_transport.py"
SPARSE = "routers/test_sparse.py reference/test_reference_routers.py"
SOFT = "routers/test_soft.py reference/test_reference_routers.py"
LIMOE = "routers/test_limoe.py routers/test_modalities.py"
MOE = "layers/test_moe.py layers/test_masks.py"
LAYERS = "reference/test_reference_layers.py layers/test_attention.py"

ANY = "layers/test_shared_and_gated.py layers/test_template_experts.py"

FAULTS = (
    # === Weights that follow choices ===
    Fault(
        "the bias is part of the gate",
        "        return selection, self.assignment.ordered(chosen, scores, sharded)",
        "        scores += self.bias\n"
        "        return selection, self.assignment.ordered(chosen, scores, sharded)",
        "routers/test_balanced.py",
    ),
    Fault(
        "the bias of busy experts rises",
        "under = keras.ops.sign(keras.ops.sum(load) - self.num_experts * load)",
        "under = keras.ops.sign(self.num_experts * load - keras.ops.sum(load))",
        "routers/test_balanced.py",
    ),
    Fault(
        "the race is run in predictions, too",
        "if training or self.random_logits is True:",
        "if True:",
        "routers/test_race.py",
    ),
    Fault(
        "padding counts in the load",
        "counted = counted & valid[..., None, None]",
        "pass",
        "routers/test_balanced.py",
    ),
    # === Experts of other kinds ===
    Fault(
        "the gate has no activation",
        "return activate(multiply(x, weights[2], weights[3])) * units",
        "return multiply(x, weights[2], weights[3]) * activate(units)",
        ANY,
    ),
    Fault(
        "padding gets the outputs of the shared expert",
        "            outputs = outputs + zero_padding(self.shared_mlp(x), mask)\n"
        "        return reshape(outputs, (-1, *ops.shape(inputs)[1:]))\n\n    def _rou",
        "            outputs = outputs + self.shared_mlp(x)\n"
        "        return reshape(outputs, (-1, *ops.shape(inputs)[1:]))\n\n    def _rou",
        ANY,
    ),
    Fault(
        "means of images count padding",
        'count = ops.sum(ops.cast(mask, "float32"), axis=1, keepdims=True)',
        'count = ops.sum(ops.ones_like(mask, "float32"), axis=1, keepdims=True)',
        ANY,
    ),
    Fault(
        "all experts of a template begin with the same weights",
        "copies += [new_copy(self.expert, self._slot_shape) for _ in others]",
        "copies += [template for _ in others]",
        ANY,
    ),
    # === Which token sits in which slot ===
    Fault(
        "padding chooses experts",
        "chosen = where(valid[..., None], chosen, num_experts)",
        "chosen = where(valid[..., None], chosen, 0)",
        ASSIGNMENT,
    ),
    Fault(
        "padding takes the slots of expert choice",
        "scores = with_real_first(scores, valid)",
        "_ = with_real_first(scores, valid)",
        ASSIGNMENT,
    ),
    Fault(
        "slots of padding count as filled",
        "filled = take_along(ops.broadcast_to(valid, ops.shape(scores)), "
        "token, axis=-1)",
        "filled = ops.ones_like(token, dtype='bool')",
        ASSIGNMENT,
    ),
    Fault(
        "second choices before the first ones of later tokens",
        "values = ops.transpose(values, (0, 2, 1))\n    return reshape(values, "
        "(-1, num_choices * num_tokens))",
        "return reshape(values, (-1, num_choices * num_tokens))",
        ASSIGNMENT,
    ),
    Fault(
        "capacity off by one",
        "filled = slots < count",
        "filled = slots + 1 < count",
        ASSIGNMENT,
    ),
    Fault(
        "a tie goes to the higher index",
        "keys = chosen * num_choices + positions(num_choices, chosen)",
        "keys = chosen * num_choices - positions(num_choices, chosen)",
        ASSIGNMENT,
    ),
    Fault(
        "the sum of scores ranks by the largest",
        "return ops.sum(chosen_scores, axis=-1)",
        "return chosen_scores[..., 0]",
        ASSIGNMENT,
    ),
    Fault(
        "pairs are ranked by their tokens",
        'by_pairs = isinstance(priority, str) and priority == "pair"',
        'by_pairs = isinstance(priority, str) and priority == "pairs"',
        ASSIGNMENT,
    ),
    Fault(
        "keep_fraction counts padding",
        "num_kept = take_rows(table, count_true(valid, axis=-1))[:, None]",
        "num_kept = table[-1]",
        ASSIGNMENT,
    ),
    Fault(
        "identity routing with experts and slots exchanged",
        "token = ops.broadcast_to(ops.transpose(token), shape)",
        "token = ops.broadcast_to(ops.reshape(token, shape[1:]), shape)",
        ASSIGNMENT,
    ),
    Fault(
        "capacity rounded down",
        '_ROUNDINGS = {"round": round,',
        '_ROUNDINGS = {"round": math.floor,',
        "ops/test_capacity.py routers/test_sparse.py",
    ),
    Fault(
        "multiple_of rounds down",
        "capacity += -capacity % multiple_of",
        "capacity -= capacity % multiple_of",
        "ops/test_capacity.py routers/test_sparse.py",
    ),
    # === Dispatch and combine ===
    Fault(
        "empty slots hold the first token",
        "return _experts_first(slots * filled[..., None])",
        "return _experts_first(slots)",
        ROUTING,
    ),
    Fault(
        "every group reads the tokens of the first",
        "first = positions(ops.shape(token)[0], token)[:, None, None] * num_tokens",
        "first = positions(ops.shape(token)[0], token)[:, None, None] * 0",
        ROUTING,
    ),
    Fault(
        "the dense view forgets the gates",
        "return DenseRouting(dispatch, dispatch * gate[:, None])",
        "return DenseRouting(dispatch, dispatch)",
        ROUTING,
    ),
    Fault(
        "outputs are not weighted by gates",
        "outputs = _experts_first(outputs * gate[..., None])",
        "outputs = _experts_first(outputs)",
        ROUTING,
    ),
    Fault(
        "choices of padding keep their gate",
        "gate = where(kept, gate, 0.0)\n        expert",
        "expert",
        "layers/test_dropless.py routers/test_sparse.py",
    ),
    # === Losses ===
    Fault(
        "padding counts in the mean over tokens",
        "count = ops.sum(ops.cast(valid, values.dtype), axis=1, keepdims=True)",
        "count = ops.sum(ops.ones_like(values[..., :1]), axis=1)",
        LOSSES,
    ),
    Fault(
        "the load of the noisy logits",
        "normal = (logits - threshold) / (noise_std * 2**0.5)",
        "normal = (noisy_logits - threshold) / (noise_std * 2**0.5)",
        LOSSES,
    ),
    Fault(
        "the GShard loss is not scaled by the experts",
        "return num_experts * ops.sum(share * probability, axis=-1)",
        "return ops.sum(share * probability, axis=-1)",
        LOSSES,
    ),
    Fault(
        "the z-loss is not squared",
        "squared = ops.square(ops.logsumexp(",
        "squared = ops.abs(ops.logsumexp(",
        LOSSES,
    ),
    Fault(
        "global entropy above the threshold is rewarded",
        "return ops.relu(threshold - entropy)",
        "return threshold - entropy",
        ENTROPY,
    ),
    Fault(
        "mutual information with the wrong sign",
        "return ops.mean(_entropy(marginals), axis=0) - ",
        "return -ops.mean(_entropy(marginals), axis=0) + ",
        ENTROPY,
    ),
    # === Plans ===
    Fault(
        "one Sinkhorn iteration too few",
        "left = num_iterations - 1\n",
        "left = num_iterations - 2\n",
        TRANSPORT,
    ),
    Fault(
        "Adam's second moment is not debiased",
        "of_first, of_second = 1.0 - 0.9**steps, 1.0 - 0.999**steps",
        "of_first, of_second = 1.0 - 0.9**steps, 1.0",
        TRANSPORT,
    ),
    # === Routers ===
    Fault(
        "a gate where the slot is empty",
        "return where(filled, take_along(by_expert, token, axis=-1), 0.0)\n\n\n",
        "return take_along(by_expert, token, axis=-1)\n\n\n",
        SPARSE,
    ),
    Fault(
        "noise divided by the experts twice",
        "return self.scores.noise_std / self.num_experts\n",
        "return self.scores.noise_std / self.num_experts**2\n",
        SPARSE,
    ),
    Fault(
        "the capacity factor of evaluation in training",
        "factors[bool(training)]",
        "factors[0]",
        "routers/test_settings.py routers/test_sparse.py",
    ),
    Fault(
        "dispatch weights sum to one over slots",
        "dispatch = softmax(dispatch, axis=1)",
        "dispatch = softmax(dispatch, axis=-1)",
        SOFT,
    ),
    Fault(
        "the scale of soft logits is left out",
        "mu = mu * (self.scale * _inverse_norm(mu, axis=0))",
        "mu = mu * _inverse_norm(mu, axis=0)",
        SOFT,
    ),
    Fault(
        "the first experts are barred from text",
        'is_open = ~masks["text"][..., None] | (experts >= first)',
        'is_open = ~masks["text"][..., None] | (experts < self.text_experts)',
        LIMOE,
    ),
    Fault(
        "LIMoE's losses are added, not averaged",
        "return self.loss_weight * (total / len(losses))",
        "return self.loss_weight * total",
        LIMOE,
    ),
    # === Layers ===
    Fault(
        "numbers in padding reach the experts",
        "    return zero_padding(inputs, mask), mask",
        "    return inputs, mask",
        MOE,
    ),
    Fault(
        "images that fill up a batch are routed",
        'is_image = ops.arange(padded, dtype="int32") < batch',
        'is_image = ops.arange(padded, dtype="int32") < padded',
        MOE,
    ),
    Fault(
        "keys are not normalized",
        "query, key = self.query_norm(query), self.key_norm(key)",
        "query = self.query_norm(query)",
        LAYERS,
    ),
    Fault(
        "masked tokens count in the mean",
        "return ops.sum(tokens, axis=1) / at_least(count, 1.0)",
        "return ops.mean(tokens, axis=1)",
        "models/test_limoe.py layers/test_masks.py",
    ),
)


def plant(fault):
    """Run the tests that should see a fault. Returns the first that fails."""
    with tempfile.TemporaryDirectory() as directory:
        package = pathlib.Path(directory) / PACKAGE.name
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        path = fault.path(package)
        text = path.read_text("utf-8").replace(fault.line, fault.planted)
        path.write_text(text, "utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-rfE"]
            + ["-p", "no:cacheprovider", "--import-mode=append", "--all-cases"]
            + ["--rootdir", str(ROOT)]
            + [str(ROOT / "tests" / name) for name in fault.tests.split()],
            # The copy shadows the library, whose tests are found from its own root.
            cwd=directory,
            env={
                **os.environ,
                "PYTHONPATH": f"{directory}:{ROOT}",
                "PYTEST_ADDOPTS": "",
            },
            capture_output=True,
            text=True,
        )
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    # 1: tests failed. Whatever else is no answer, such as a library that fails to load.
    if done.returncode not in (0, 1):
        raise RuntimeError(
            f"'{fault.name}': {done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return failed[0].removeprefix("FAILED ").split(" - ")[0] if failed else None


def main(names):
    backend = os.environ["KERAS_BACKEND"]
    faults = [fault for fault in FAULTS if not names or fault.name in names]
    unseen = []
    for fault in faults:
        seen_by = plant(fault)
        print(f"[{backend}] {fault.name}: {seen_by or 'NOT SEEN'}", flush=True)
        unseen += [] if seen_by else [fault.name]
    print(f"[{backend}] {len(faults) - len(unseen)} of {len(faults)} seen")
    return 1 if unseen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
