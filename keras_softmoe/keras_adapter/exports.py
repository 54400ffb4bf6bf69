"""Files: presets of KerasHub, and programs of PyTorch's export."""

import re


def has_preset_file(preset, file):
    """Return whether a preset has a file, fetching it for a handle.

    Would be replaced by: a public function of KerasHub that finds files by a handle.
    """
    from keras_hub.src.utils.preset_utils import check_file_exists

    return check_file_exists(str(preset), file)


def sizes_may_be_one():
    """Make `torch.export` not assume that open sizes exceed one, in a `with` block.

    Would be replaced by: `torch.export.Dim` for sizes that follow from others.
    """
    from torch.fx.experimental import _config

    return _config.patch(backed_size_oblivious=True)


def drop_assertions_of_more_than_one(graph):
    """Remove the assertions of an exported graph that an open size is not one.

    PyTorch adds them for memory layouts; no result depends on them.
    Would be replaced by: `torch.export` without unnecessary assertions.
    """
    import torch

    for node in list(graph.nodes):
        is_assertion = node.target is torch.ops.aten._assert_scalar.default
        if is_assertion and re.search(r"expression Ne\(.*, 1\) on", node.args[1]):
            graph.erase_node(node)
    graph.eliminate_dead_code()
