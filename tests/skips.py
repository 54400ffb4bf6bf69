"""Tests that do not run on every backend, and the reasons: all of them are here.

PyTorch, which compiles nothing, runs most. `RUNS_ON` lists files that are not collected
on some backends, `ON_ALL` the tests of a file that run on the others too. Of tests with
several parameters the others run enough to see each value of each parameter, of
`reference/` nearly all of them. `LONG` lists tests that take many seconds each.
The option `--all-cases`, as in `make test-all`, selects all of them.

`REASONS` are those for which a test is skipped. A test that is skipped for another
reason fails (`conftest.py`). Nothing is skipped for want of a file of this repository.
"""

import importlib
import itertools

import keras
import pytest

from keras_softmoe.keras_adapter.distributions import backend_distributes

BACKEND = keras.backend.backend()

REASONS = {
    # The feature belongs to some backends.
    "distribution": "one process has several devices on JAX only; `distribution/"
    "test_backends.py` tests what others say",
    "refusal": "not refused on this backend, which has a test of what it does",
    "stream": "PyTorch refuses it; a test of that is beside this one",
    "own loop": "a loop, compiler or format of another backend",
    "own onnx": "TensorFlow writes ONNX itself, with no other process to tell",
    # The same code everywhere, tested where that is quick.
    "one file": "what another process writes is the same from everywhere",
    "one backend": "the same code on all backends, tested on another one",
    "page": "this page is tested on another backend",
    # What a machine need not have.
    "package": "a package that the extra `test` does not ask for, such as timm, is "
    "missing or does not fit the others",
    "mount": "nothing can be mounted here",
}

# Files that do not run on every backend, so that the suites are short and take equally
# long: of what computes without one, and of what is long and made of parts that are
# tested on all. (`models/test_backends.py` compares presets on all of them.)
RUNS_ON = {
    # Figures and tables of arrays, and sums over decisions: `test_soft.py` sees the
    # decisions of every backend.
    "analysis/test_blocks.py": ("torch",),
    "analysis/test_figures.py": ("torch",),
    "analysis/test_maps.py": ("torch",),
    "analysis/test_masked_padding.py": ("torch",),
    "analysis/test_modalities.py": ("torch",),
    "analysis/test_monitor.py": ("torch",),
    "analysis/test_panels_*.py": ("torch",),
    "analysis/test_report*.py": ("torch",),
    "analysis/test_routing.py": ("torch",),
    "analysis/test_streaming.py": ("torch",),
    "catalogue/*": ("torch",),
    "checkpoints/test_vmoe.py": ("torch",),
    "checkpoints/test_checkpoint_fuzz.py": ("jax",),
    "checkpoints/test_hostile_checkpoints.py": ("torch",),
    "checkpoints/test_remote.py": ("tensorflow",),
    "checkpoints/test_safetensors.py": ("tensorflow",),
    "checkpoints/test_vit*.py": ("torch",),
    # Each use of Keras is tested on all where the library makes it.
    "test_keras_adapter.py": ("torch",),
    "sharding/*": ("torch",),
    "layers/test_one_graph.py": ("torch",),
    "layers/test_wrappers.py": ("torch",),
    "ops/test_selection.py": ("tensorflow", "torch"),
    "ops/test_tiles.py": ("jax",),
    # What it does in a layer is tested on all: `layers/test_lora.py`,
    # `layers/test_quantized_experts.py`.
    "models/test_adaptation.py": ("torch",),
    "models/test_channels_first.py": ("torch",),
    "models/test_contrastive_files.py": ("torch",),
    "models/test_conversion.py": ("torch",),
    "models/test_data.py": ("torch",),
    "models/test_accelerators.py": ("torch",),
    "models/test_limoe.py": ("torch",),
    "converters/test_to_dense.py": ("torch",),
    "converters/test_dense_model.py": ("torch",),
    "converters/test_graphs_over_models.py": ("torch",),
    "models/test_initialization.py": ("torch",),
    "models/test_torch_files.py": ("torch",),
    "models/test_torch_modules.py": ("torch",),
    "converters/test_upcycle.py": ("torch",),
    "models/test_vmoe_params.py": ("torch",),
    # `timm` and `transformers` are of PyTorch.
    "models/test_torch_judges.py": ("torch",),
    "datasets/*": ("torch",),
    "distribution/test_plan*.py": ("torch",),
    # From Keras 3.16 on: `make nightly`.
    "distribution/test_two_torch_processes.py": ("torch",) * backend_distributes(),
    "architecture/*": ("torch",),
    "evaluation/test_model_cost.py": ("torch",),
    "evaluation/test_architectures.py": ("torch",),
    "evaluation/test_limoe_cost.py": ("torch",),
    "evaluation/test_sweep*.py": ("torch",),
    "experiments/*": ("torch",),
    # Decisions against the twins are in `routers/`, on all.
    "guards/test_golden.py": ("torch",),
    "models/test_broken_presets.py": ("torch",),
    # Both losses are trained on all: `models/test_two_towers.py`.
    "models/test_contrastive.py": ("torch",),
    "models/test_contrastive_preprocessor.py": ("torch",),
    "models/test_pruning.py": ("torch",),
    "converters/test_upcycling_starts.py": ("torch",),
    "reference/test_coverage.py": ("torch",),
    "test_benchmarks.py": ("torch",),
    "test_checks.py": ("torch",),
    "test_each_file_has_tests.py": ("torch",),
    "test_files.py": ("torch",),
    "test_imports.py": ("torch",),
    "test_language.py": ("torch",),
    "test_package.py": ("torch",),
    "test_pages.py": ("torch",),
    "test_security.py": ("torch",),
    "test_tolerances.py": ("torch",),
    "test_walks.py": ("torch",),
    "test_trained.py": ("torch",),
    # A hundredth of what `make torture` does on each backend.
    "test_torture.py": ("torch",),
    # On all in `reference/test_reference_training.py`
    "training/test_adafactor.py": ("torch",),
    "training/test_contrastive_recipes.py": ("torch",),
    "training/test_finetuning.py": ("torch",),
    "training/test_pipeline.py": ("torch",),
    "training/test_paper_recipes.py": ("torch",),
    "training/test_soups.py": ("torch",),
}


# Files of models, and of properties of layers whose numbers other files compare on each
# backend. The tests listed also run on JAX and TensorFlow, the others on PyTorch alone.
# A name may have an identifier of parameters: `test_outputs[soft]`. The planted faults
# of `guards/faults.py` are seen on each backend.
ON_ALL = {
    "analysis/test_soft.py": ("test_every_number_of_a_block",),
    "models/test_balance.py": (
        "test_fit_warns_once[arrays]",
        "test_the_look_at_a_batch_changes_nothing",
        "test_the_metric_is_the_loss_of_the_routers",
    ),
    "models/test_fitting.py": (
        "test_loop_of_jax",
        "test_loop_of_tensorflow",
        "test_without_tensorflow",
        "test_no_step_after_the_last_batch",
    ),
    "models/test_image_classifier.py": (
        "test_fit_learns",
        "test_keras_file",
        "test_mixed_precision",
    ),
    "models/test_mutable_routing.py": ("test_compiled_functions_obey",),
    "models/test_run_checks.py": (
        "test_a_compiled_run_is_refused_where_decisions_are_recorded",
        "test_a_model_in_training_predicts_in_no_other_thread_on_jax",
        "test_other_weights_than_those_of_the_optimizer[freeze]",
    ),
    "models/test_trainable.py": ("test_a_frozen_router_adds_no_loss",),
    "models/test_two_towers.py": (
        "test_losses_of_both_towers_are_trained",
        "test_outputs",
    ),
    "models/test_vit.py": ("test_outputs",),
    "distribution/test_backup.py": (
        "test_training_goes_on_as_if_nothing_had_happened[3]",
    ),
    "converters/test_graphs_over_models.py": (
        "test_layer_around_a_mixture_in_a_graph",
        "test_sequential_of_a_model_and_a_head",
    ),
    "layers/test_attention.py": (
        "test_attention",
        "test_attention_pooling",
        "test_dense_encoder_block",
    ),
    "layers/test_derivatives.py": (
        "test_forward_mode_and_second_order[token choice]",
        "test_gradients_of_each_image[token choice]",
        "test_without_capacity",
    ),
    "layers/test_dropless.py": (
        "test_the_twin[nearly all tokens to one expert]",
        "test_the_twin[odd widths]",
        "test_the_twin[two choices, some tokens masked]",
        "test_where_rows_cannot_be_counted",
    ),
    "layers/test_empty_batch.py": ("test_dispatch_and_combine",),
    "layers/test_every_layer.py": (
        "test_moe_encoder_block[softmax_token_choice-2]",
        "test_training_step_with_every_router",
    ),
    "layers/test_experts.py": (
        "test_each_expert_is_an_mlp_of_its_own",
        "test_remat_changes_no_number",
    ),
    "layers/test_lora.py": (
        "test_forward_and_gradients_are_those_of_numpy",
        "test_lora_of_a_quantized_bank[quantize-int4]",
    ),
    "layers/test_masks.py": (
        "test_attention_pooling",
        "test_encoder_block",
        "test_like_a_shorter_sequence[batch priority-1-auto]",
        "test_like_a_shorter_sequence[dropless-4-einsum]",
        "test_like_a_shorter_sequence[expert choice-None-gather]",
        "test_like_a_shorter_sequence[soft-4-auto]",
        "test_sequence_without_any_token[soft]",
        "test_sequence_without_any_token[batch priority]",
        "test_text_tower[gap]",
    ),
    "layers/test_shared_and_gated.py": (
        "test_dropless_gradients_are_those_of_slots",
        "test_gated_and_shared_experts_are_their_twins",
        "test_whole_images_are_routed",
    ),
    "layers/test_template_experts.py": (
        "test_dropout_differs_by_expert_and_by_step",
        "test_each_expert_is_the_template_with_its_own_weights",
        "test_initial_weights",
    ),
    "layers/test_moe.py": (
        "test_batch_sizes_in_a_compiled_model[token_choice-gather]",
        "test_dropped_token_comes_back_as_zeros",
        "test_groups_of_images_compete_for_slots",
        "test_padding_takes_no_slot",
        "test_padding_under_a_soft_router",
        "test_tokens_are_rounded_on_their_way[gather]",
    ),
    "layers/test_quantized_experts.py": (
        "test_experts_with_banks_in_int8_and_int4[which0-False]",
        "test_int4_rounds_each_block_of_each_expert[7-5-3]",
    ),
    "layers/test_soft_moe.py": ("test_slots_mix_the_tokens_themselves",),
    "layers/test_limoe_block.py": (
        "test_both_dispatchers",
        "test_layer_is_its_twin_and_padding_has_no_say",
    ),
    "converters/test_add_experts.py": ("test_family[CLIP]",),
    "models/test_convertible_presets.py": ("test_converted_at_first_use",),
    "models/test_from_preset.py": ("test_fine_tuning_and_saving_over",),
    "models/test_whole_images.py": ("test_layers_of_a_user[convolution]",),
    "routers/test_balanced.py": (
        "test_load_is_even_after_500_steps",
        "test_the_bias_is_its_twins",
    ),
    "routers/test_race.py": (
        "test_predictions_depend_on_no_other_token",
        "test_training_and_threshold_are_their_twins",
    ),
    "routers/test_floatx.py": (
        "test_balancing_losses_are_added_to_that_of_the_model[float16]",
        "test_routers_are_finite[float16-soft-True]",
        "test_routers_are_finite[float16-softmax token choice-True]",
    ),
    "routers/test_moe_paths.py": (
        "test_experts_follow_the_policy",
        "test_gradient_of_a_plan_that_xla_compiles[sinkhorn_token_choice]",
        "test_layer_is_its_twin",
    ),
    "training/test_distiller.py": (
        "test_the_balancing_loss_moves_the_router_as_in_fit",
    ),
    "training/test_muon.py": (
        "test_an_expert_moves_as_a_matrix_of_its_own[settings0-shape0]",
    ),
    "training/test_optimizers.py": (
        "test_accumulated_gradients",
        "test_adam",
        "test_mixed_precision",
        "test_sgd",
        "test_training_goes_on_after_saving",
    ),
}


# Of these the MLPs are found and replaced as in the others.
_OTHER_FAMILIES = (
    "DeiT",
    "DINOv2, SwiGLU",
    "DINOv3",
    "SigLIP",
    "MetaCLIP 2",
    "VideoPrism",
    "ViTDet (SAM)",
)

# Tests of long programs, of parts that shorter tests cover: `make test-all` runs them.
LONG = {
    "models/test_fitting.py": (
        "test_compiled_once_for_a_shape",
        "test_jit_compile",
        "test_one_graph",
    ),
    "layers/test_one_graph.py": tuple(
        f"test_one_graph_in_training[{router}]"
        for router in (
            *("bias", "race", "expert choice", "sinkhorn token choice", "identity"),
            *("sinkhorn expert choice", "sparse transport", "soft", "soft with noise"),
        )
    ),
    "converters/test_add_experts.py": tuple(
        f"test_family[{family}]" for family in _OTHER_FAMILIES
    ),
    "converters/test_graphs_over_models.py": tuple(
        f"test_graph_is_loaded_equal[{family}]"
        for family in (*_OTHER_FAMILIES, *("DINOv2", "CLIP", "Swin", "BERT"))
    ),
    "distribution/test_parallel.py": (
        "test_a_model_may_be_built_by_its_first_batch",
        "test_dense_kernels_are_sharded_on_request",
        "test_every_router_and_every_layer_costs_four_all_to_alls",
        "test_experts_of_any_layer_are_placed",
        "test_factors_of_lora_lie_with_their_experts",
        "test_what_adafactor_keeps_lies_with_its_experts",
    ),
    "distribution/test_mesh_plan.py": ("test_every_preset_has_a_plan",),
    "distribution/test_plan_transfers.py": (
        "test_the_plan_says_what_cut_dense_kernels_send",
        "test_the_plan_says_what_pairs_send",
    ),
    "distribution/test_two_processes.py": (
        "test_a_preset_of_two_processes_is_whole",
        "test_each_process_has_all_predictions",
        "test_losses_until_the_end_of_a_process",
        "test_presets_are_those_of_one_process",
        "test_training_goes_on_from_the_backup",
    ),
    "evaluation/test_model_cost.py": ("test_largest_preset_is_not_built",),
    "examples/test_docstrings.py": ("test_examples_run[exporting.export_model]",),
    "examples/test_pages.py": (
        "test_page_runs[docs/cookbook.md]",
        "test_page_runs[docs/faq.md]",
    ),
    "experiments/test_letters.py": (
        "test_program",
        "test_upcycling_program",
    ),
    "experiments/test_presets.py": ("test_a_glyph_preset_is_trained",),
    "experiments/test_real_weights.py": ("test_the_program_goes_on_and_reports",),
    "exporting/test_export.py": (
        "test_classes_and_options_of_this_program_only",
        "test_encoders_of_limoe",
        "test_experts_of_any_layer",
        "test_fixed_batch_for_groups_of_the_whole_batch",
        "test_functional_model_of_a_user",
        "test_pixels",
        "test_pixels_of_another_size",
        "test_settings_of_routers_as_they_stand",
        "test_what_dense_models_were_trained_with",
    ),
    "guards/test_faults.py": ("test_a_planted_fault_is_seen",),
    "examples/test_guides.py": (
        "test_guide[adapting.py]",
        "test_guide[back_to_dense.py]",
        "test_guide[data_parallel.py]",
        "test_guide[exporting.py]",
        "test_guide[few_shot_probing.py]",
        "test_guide[fit_on_a_small_dataset.py]",
        "test_guide[inside_soft_moe.py]",
        "test_guide[limoe_routing.py]",
        "test_guide[limoe_zero_shot.py]",
        "test_guide[placing_experts.py]",
        "test_guide[real_weights.py]",
        "test_guide[released_vmoe_checkpoints.py]",
        "test_guide[switching_backends.py]",
        "test_guide[upcycling.py]",
        "test_guide[vmoe_at_low_capacity.py]",
    ),
    "models/test_backends.py": ("test_same_outputs_on_another_backend",),
    "routers/test_balanced.py": ("test_load_is_even_after_500_steps",),
    "routers/test_recording.py": ("test_inside_a_compiled_function",),
    "test_files.py": ("test_one_process_at_a_time",),
    "test_package.py": ("test_wheel_works_outside_the_checkout",),
    "test_pages.py": (
        "test_no_link_of_the_site_is_dead",
        "test_search_and_pictures",
        "test_the_site_loads_nothing_from_another_host",
        "test_the_site_shows_every_recorded_figure",
    ),
    "test_trained.py": (
        "test_retrieval_is_that_of_the_card",
        "test_zero_shot_is_that_of_the_card",
        "test_few_shot_accuracy_is_that_of_the_card",
        "test_int4_keeps_the_accuracy_on_digits",
        "test_int8_keeps_the_accuracy_on_digits",
        "test_presets_know_letters",
        "test_soft_features_beat_raw_pixels",
    ),
    "test_torture.py": (
        "test_a_killed_training_ends_like_another",
        "test_memory_stays",
        "test_short_form",
    ),
    "training/test_contrastive_recipes.py": ("test_recipe",),
    "training/test_paper_recipes.py": ("test_recipe[imagenet_from_scratch]",),
}


def selected(items, folder):
    """Of collected tests those that run on this backend.

    Args:
        items: list of tests, those of one function next to each other.
        folder: `pathlib.Path` of the tests.
    """

    def is_in(table, item, default):
        names = table.get(item.path.relative_to(folder).as_posix())
        if names is None:
            return default
        return bool({item.name, item.originalname} & set(names))

    items = [item for item in items if not is_in(LONG, item, False)]
    if BACKEND == "torch":
        return set(items)
    kept = {item for item in covering(items) if is_in(ON_ALL, item, True)}
    return kept | {item for item in items if is_whole(item.path)}


def parameters(item):
    """Set of pairs of a collected test: names of its parameters and their values."""
    callspec = getattr(item, "callspec", None)
    return {(k, repr(v)) for k, v in callspec.params.items()} if callspec else set()


def covering(items):
    """Tests that together have each value of each parameter of their function.

    Args:
        items: list of collected tests, those of one function next to each other.

    Returns:
        Set of the items that are kept. Greedy: of the tests of one function the next is
        the one with the most values that no test before it had.
    """
    kept = set()
    for _, tests in itertools.groupby(items, key=lambda i: (i.path, i.originalname)):
        tests = list(tests)
        open_values = set().union(*map(parameters, tests))
        if not open_values:
            kept.update(tests)
        while open_values:
            best = max(tests, key=lambda test: len(parameters(test) & open_values))
            open_values -= parameters(best)
            kept.add(best)
    return kept


def is_whole(path):
    """Whether each backend runs all cases of a file: numbers of the papers' own code.

    The plans of optimal transport are left to `covering`: each case and each size runs.
    """
    is_transport = path.stem == "test_reference_transport"
    return path.parent.name == "reference" and not is_transport


def only_on(*backends, because):
    """Mark of tests that run on some backends only.

    Args:
        *backends: str, names of backends.
        because: str, a key of `REASONS`.
    """
    return pytest.mark.skipif(BACKEND not in backends, reason=REASONS[because])


def needs(name):
    """A module of a package that the extra `test` does not ask for, or a skip."""
    # A release may not fit the other packages that are installed.
    try:
        return importlib.import_module(name)
    except Exception:
        pytest.skip(REASONS["package"])
