"""Tests that do not run on every backend, and the reasons: all of them are here.

PyTorch, which compiles nothing, runs most. `RUNS_ON` lists files that are not collected
on some backends, `ON_ALL` the tests of a file that run on the others too. Of tests with
several parameters JAX and TensorFlow together run enough to see each value of each.
`LONG` lists tests that take many seconds each, and cases that are like others. The
option `--all-cases`, as in `make test-all`, selects all of them.

`REASONS` are those for which a test is skipped. A test that is skipped for another
reason fails (`conftest.py`). Nothing is skipped for want of a file of this repository.
"""

import importlib
import itertools
import pathlib

import keras
import pytest

from keras_softmoe.keras_adapter.data import backend_distributes

BACKEND = keras.backend.backend()

REASONS = {
    # The feature belongs to some backends.
    "distribution": "one process has several devices on JAX only; `distribution/"
    "test_backends.py` tests what others say",
    "refusal": "not refused on this backend, which has a test of what it does",
    "own loop": "a loop, compiler or format of another backend",
    "own onnx": "TensorFlow writes ONNX itself, with no other process to tell",
    # The same code everywhere, tested where that is quick.
    "one file": "what another process writes is the same from everywhere",
    "one backend": "the same code on all backends, tested on another one",
    "families": "a large task, of which `--all-families` makes the table",
    "page": "this page is tested on another backend",
    # What a machine need not have.
    "package": "a package that the extra `test` does not ask for, such as timm, is "
    "missing or does not fit the others",
    "mount": "nothing can be mounted here",
}

# Files that do not run on every backend, so that the suites are short and take equally
# long: of what computes without one, and of what is long and made of parts that are
# tested on all. (`models/test_backends.py` compares presets on all of them.) Here are,
# by folder, those that run on PyTorch only.
_ON_PYTORCH = {
    # What computes without a backend. `torture`: a hundredth of `make torture`.
    ".": "benchmarks checks each_file_has_tests files imports keras_adapter language "
    "package pages security tolerances torture trained walks",
    # Figures and tables of arrays, and sums over decisions: `test_soft.py` sees the
    # decisions of every backend.
    "analysis": "blocks maps masked_padding modalities monitor panels_* "
    "report* routing streaming",
    "architecture": "*",
    "catalogue": "*",
    "checkpoints": "hostile_checkpoints vit* vmoe",
    "converters": "dense_model graphs_over_models to_dense upcycle upcycling_starts",
    "datasets": "*",
    "distribution": "plan*",
    "evaluation": "limoe_cost model_cost sweep*",
    "experiments": "*",
    # Decisions against the twins are in `routers/`, on all.
    "guards": "golden",
    "layers": "one_graph quick_calls wrappers",
    # What adaptation does in a layer is tested on all: `layers/test_lora.py`,
    # `layers/test_quantized_experts.py`. So are both contrastive losses, in
    # `models/test_two_towers.py`. `timm` and `transformers` are of PyTorch.
    "models": "accelerators adaptation broken_presets channels_first contrastive "
    "contrastive_files contrastive_preprocessor conversion data initialization limoe "
    "pruning torch_files torch_judges torch_modules vmoe_params",
    "reference": "coverage",
    "routers": "operators",
    "sharding": "*",
    # Adafactor on all in `reference/test_reference_training.py`
    "training": "adafactor contrastive_recipes finetuning paper_recipes pipeline soups",
}
RUNS_ON = {
    (pathlib.PurePath(folder) / f"test_{name}.py").as_posix(): ("torch",)
    for folder, names in _ON_PYTORCH.items()
    for name in names.split()
} | {
    "checkpoints/test_checkpoint_fuzz.py": ("jax",),
    "checkpoints/test_npz.py": ("tensorflow", "torch"),
    "checkpoints/test_remote.py": ("tensorflow",),
    "checkpoints/test_safetensors.py": ("tensorflow",),
    # From Keras 3.16 on: `make nightly`.
    "distribution/test_two_torch_processes.py": ("torch",) * backend_distributes(),
    "ops/test_selection.py": ("tensorflow", "torch"),
    "ops/test_tiles.py": ("jax",),
    "reference/test_reference_transport.py": ("tensorflow", "torch"),
}


# Files of models, and of properties of layers whose numbers other files compare on each
# backend. The tests listed also run on JAX and TensorFlow, the others on PyTorch alone.
# A name may have an identifier of parameters: `test_outputs[soft]`. With `@jax` at its
# end the test does not run on TensorFlow, with `@tensorflow` not on JAX. The planted
# faults of `guards/faults.py` are seen on each backend.
ON_ALL = {
    "analysis/test_soft.py": ("test_every_number_of_a_block",),
    "models/test_balance.py": "test_the_metric_is_the_loss_of_the_routers@tensorflow",
    "models/test_fitting.py": "test_loop_of_jax[sparse] "
    "test_loop_of_tensorflow[sparse] test_no_step_after_the_last_batch@jax "
    "test_without_tensorflow",
    "models/test_image_segmenter.py": "test_files[4] test_maps_are_the_patches[token] "
    "test_pixels_of_an_ignored_class_do_not_count",
    "models/test_image_classifier.py": "test_fit_learns@jax "
    "test_keras_file[sparse]@jax test_mixed_precision@tensorflow",
    "models/test_mutable_routing.py": ("test_compiled_functions_obey",),
    "models/test_run_checks.py": (
        "test_a_compiled_run_is_refused_where_decisions_are_recorded[fit-True]",
        "test_a_model_in_training_predicts_in_no_other_thread_on_jax@jax",
        "test_other_weights_than_those_of_the_optimizer[freeze]@jax",
    ),
    "models/test_trainable.py": ("test_a_frozen_router_adds_no_loss",),
    "models/test_two_towers.py": "test_losses_of_both_towers_are_trained@tensorflow "
    "test_outputs[dims1]",
    "models/test_vit.py": ("test_outputs",),
    "distribution/test_mesh_plan.py": (
        "test_activations_are_near_what_xla_keeps",
        "test_weights_are_those_of_a_model_cut_by_hand[two kinds]@jax",
    ),
    "distribution/test_backup.py": (
        "test_training_goes_on_as_if_nothing_had_happened[3]",
    ),
    "converters/test_graphs_over_models.py": "test_layer_around_a_mixture_in_a_graph "
    "test_sequential_of_a_model_and_a_head",
    "layers/test_attention.py": "test_attention test_attention_pooling@tensorflow "
    "test_dense_encoder_block@tensorflow",
    "layers/test_derivatives.py": (
        "test_forward_mode_and_second_order[token choice]",
        "test_gradients_of_each_image[token choice]",
        "test_without_capacity",
    ),
    "layers/test_dropless.py": (
        "test_the_twin[nearly all tokens to one expert]@tensorflow",
        "test_predictions_alone@tensorflow",
        "test_the_twin[odd widths]@tensorflow",
        "test_the_twin[two choices, some tokens masked]",
        "test_where_rows_cannot_be_counted",
    ),
    "layers/test_empty_batch.py": ("test_dispatch_and_combine",),
    "layers/test_every_layer.py": (
        "test_moe_encoder_block[softmax_token_choice-2]@tensorflow",
        "test_training_step_with_every_router",
    ),
    "layers/test_experts.py": "test_each_expert_is_an_mlp_of_its_own "
    "test_remat_changes_no_number",
    "layers/test_lora.py": "test_forward_and_gradients_are_those_of_numpy "
    "test_lora_of_a_quantized_bank[quantize]@tensorflow",
    "layers/test_masks.py": (
        "test_attention_pooling@tensorflow",
        "test_encoder_block",
        "test_like_a_shorter_sequence[batch priority-1-auto]@jax",
        "test_like_a_shorter_sequence[dropless-4-einsum]",
        "test_like_a_shorter_sequence[expert choice-None-gather]@tensorflow",
        "test_like_a_shorter_sequence[soft-4-auto]@tensorflow",
        "test_masks_of_any_dtype[identity-bfloat16]@jax",
        "test_masks_of_any_dtype[sparse-float32]@tensorflow",
        "test_sequence_without_any_token[soft]@tensorflow",
        "test_sequence_without_any_token[batch priority]@jax",
        "test_text_tower[gap]@tensorflow",
    ),
    "layers/test_shared_and_gated.py": "test_dropless_gradients_are_those_of_slots "
    "test_gated_and_shared_experts_are_their_twins test_whole_images_are_routed",
    "layers/test_template_experts.py": "test_dropout_differs_by_expert_and_by_step "
    "test_each_expert_is_the_template_with_its_own_weights test_initial_weights",
    "layers/test_moe.py": "test_batch_sizes_in_a_compiled_model[token_choice-gather] "
    "test_dropped_token_comes_back_as_zeros test_groups_of_images_compete_for_slots "
    "test_padding_takes_no_slot test_padding_under_a_soft_router@tensorflow "
    "test_tokens_are_rounded_on_their_way[gather]",
    "layers/test_quantized_experts.py": (
        "test_experts_with_one_bank_in_int8@tensorflow",
    ),
    "layers/test_soft_moe.py": ("test_slots_mix_the_tokens_themselves",),
    "layers/test_limoe_block.py": "test_both_dispatchers "
    "test_layer_is_its_twin_and_padding_has_no_say",
    "converters/test_add_experts.py": "test_family[ViT]@jax "
    "test_gated_mlps_of_decoders[Llama]@jax "
    "test_gated_mlps_of_decoders[Gemma]@tensorflow",
    "converters/test_sparsify.py": "test_generation_with_caches[Mixtral] "
    "test_only_the_chosen_experts_are_computed[Qwen3Moe] "
    "test_outputs_gradients_and_balancing_loss_are_equal[Qwen3Moe] "
    "test_outputs_gradients_and_balancing_loss_are_equal[QwenMoe] "
    "test_outputs_gradients_and_balancing_loss_are_equal[Mixtral]",
    "models/test_convertible_presets.py": ("test_converted_at_first_use",),
    "models/test_from_preset.py": ("test_fine_tuning_and_saving_over@tensorflow",),
    "models/test_whole_images.py": ("test_layers_of_a_user[convolution]",),
    "routers/test_balanced.py": "test_load_is_even_after_500_steps "
    "test_the_bias_is_its_twins",
    "routers/test_race.py": "test_predictions_depend_on_no_other_token "
    "test_training_and_threshold_are_their_twins",
    "routers/test_floatx.py": (
        "test_balancing_losses_are_added_to_that_of_the_model[float16]",
        "test_routers_are_finite[float16-soft-True]",
        "test_routers_are_finite[float16-softmax token choice-True]@tensorflow",
    ),
    "routers/test_moe_paths.py": "test_experts_follow_the_policy "
    "test_gradient_of_a_plan_that_xla_compiles[sinkhorn_token_choice] "
    "test_layer_is_its_twin",
    "training/test_distiller.py": (
        "test_the_balancing_loss_moves_the_router_as_in_fit@jax",
    ),
    "training/test_muon.py": (
        "test_an_expert_moves_as_a_matrix_of_its_own[settings0-shape0]",
    ),
    "training/test_optimizers.py": "test_accumulated_gradients test_adam "
    "test_mixed_precision test_sgd test_training_goes_on_after_saving",
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


def _cases(function, *cases):
    """Names of a test with some of its parameters."""
    return tuple(f"{function}[{case}]" for case in cases)


# Tests of long programs, of parts that shorter tests cover, and cases of which shorter
# ones are like them: `make test-all` runs them. `*` is every test of a file.
LONG = {
    "analysis/test_report.py": ("test_sparse_backbone",),
    "analysis/test_routing.py": _cases(
        "test_blocks_are_chosen",
        *("by_class", "by_position", "concentration", "tokens_per_slot"),
    ),
    "models/test_accelerators.py": _cases(
        "test_a_model_is_one_graph", "dense", "expert choice"
    ),
    "models/test_adaptation.py": (
        *_cases("test_a_quantized_backbone_comes_back", "float8", "int8"),
    ),
    # Of a file and its loading: `models/test_from_preset.py`, and for LIMoE
    # `models/test_contrastive_files.py`.
    "models/test_backends.py": "test_same_outputs_on_another_backend "
    "test_same_outputs_when_loaded",
    "models/test_channels_first.py": _cases(
        "test_numbers_are_those_of_channels_last",
        *("another_resolution", "fit_pairs", "recipe", "upcycle"),
    ),
    "models/test_contrastive_preprocessor.py": _cases(
        "test_bad_captions_in_a_pipeline", "bad1-more than sequence_length=8"
    ),
    "models/test_data.py": (
        *_cases("test_grey_images", "False"),
        *_cases("test_kinds_of_images", "float16", "float64", "int64"),
    ),
    "models/test_from_preset.py": (
        *_cases("test_other_resolution", "image_shape0-gap", "image_shape1-token"),
        *_cases("test_predictions_survive", "dense"),
    ),
    "models/test_image_classifier.py": (
        *_cases("test_keras_file", "dense"),
        *_cases("test_fit_evaluate_predict_in_any_batch_size", 1),
        "test_a_crossentropy_by_name_is_that_of_the_logits[categorical_crossentropy]",
        *_cases(
            "test_default_metric_is_for_the_labels_of_the_loss",
            *("mse", "categorical_crossentropy"),
        ),
    ),
    "models/test_pruning.py": (
        *_cases("test_pruned_model_is_saved_and_loaded", "router_drop"),
        *_cases("test_what_is_pruned_is_gone", "router_drop"),
    ),
    "models/test_run_checks.py": _cases(
        "test_other_weights_than_those_of_the_optimizer", "unfreeze"
    ),
    "models/test_two_towers.py": ("test_preset[True]",),
    "models/test_fitting.py": "test_loss_scaling[False] "
    "test_model_checkpoint[{epoch}.weights.h5] test_compiled_once_for_a_shape "
    "test_jit_compile test_one_graph",
    "models/test_torch_modules.py": _cases(
        "test_each_weight_is_a_parameter_once",
        *("Sequential", "subclass", "two towers", "two towers, file", "two, LoRA"),
        *("add_experts", "preset"),
    ),
    "models/test_trainable.py": _cases(
        "test_files_keep_what_is_frozen",
        *("freeze_blocks", "freeze_experts", "freeze_router", "freeze_head"),
    ),
    "layers/test_one_graph.py": _cases(
        "test_one_graph_in_training",
        *("dropless", "token choice", "bias", "race", "expert choice", "identity"),
        *("sinkhorn token choice", "sinkhorn expert choice", "sparse transport"),
        *("soft", "soft with noise"),
    ),
    "converters/test_add_experts.py": (
        *_cases("test_family", *_OTHER_FAMILIES, "DINOv2", "Swin", "BERT"),
        *_cases("test_a_quantized_model_comes_back", "float8"),
        *_cases("test_it_is_said_where_outputs_change", *range(1, 21, 2)),
        *_cases("test_rule", "predicate", "sequential"),
    ),
    "converters/test_dense_model.py": (
        *_cases("test_another_resolution_of_dinov2", "DINOV2Backbone, registers"),
        *_cases("test_presets", "DINOV2Backbone, registers"),
        *_cases("test_upcycled", "ViTBackbone, rectangle", "ViTBackbone, epsilon"),
    ),
    "converters/test_graphs_over_models.py": (
        "test_files_are_read_in_a_new_process",
        "test_segmenter_with_experts",
        "test_quantized_graph",
        *_cases("test_graph_with_factors_of_lora", "GPT-2"),
        *_cases(
            "test_public_attributes_are_kept",
            *("DeiT", "DINOv2", "SigLIP", "Swin", "RoBERTa", "DistilBERT", "OPT"),
        ),
        *_cases(
            "test_configuration_is_a_copy",
            *("add_experts(task)", "classifier", "text", "layer of a model"),
        ),
        *_cases(
            "test_graph_is_loaded_equal",
            *(*_OTHER_FAMILIES, "DINOv2", "CLIP", "Swin", "BERT"),
        ),
    ),
    "converters/test_to_dense.py": _cases(
        "test_models_of_keras_hub", "DINOv2, SwiGLU", "CLIP"
    ),
    "distribution/test_parallel.py": "test_a_model_may_be_built_by_its_first_batch "
    "test_dense_kernels_are_sharded_on_request "
    "test_every_router_and_every_layer_costs_four_all_to_alls "
    "test_experts_of_any_layer_are_placed test_factors_of_lora_lie_with_their_experts "
    "test_what_adafactor_keeps_lies_with_its_experts",
    "distribution/test_backup.py": _cases("test_what_global_generators_draw", 6, 10),
    "distribution/test_data_parallel.py": (
        "test_replicas_route_smaller_groups_than_one_model",
    ),
    "distribution/test_mesh_plan.py": ("test_every_preset_has_a_plan",),
    "distribution/test_plan_transfers.py": (
        "test_the_plan_says_what_cut_dense_kernels_send",
        "test_the_plan_says_what_pairs_send",
    ),
    "distribution/test_two_processes.py": "test_a_preset_of_two_processes_is_whole "
    "test_each_process_has_all_predictions test_losses_until_the_end_of_a_process "
    "test_presets_are_those_of_one_process test_training_goes_on_from_the_backup",
    "evaluation/test_model_cost.py": ("test_largest_preset_is_not_built",),
    "evaluation/test_sweeps.py": ("test_random_routers[layers1]",),
    "examples/test_docstrings.py": _cases(
        "test_examples_run",
        *("analysis.BlockStatistics", "analysis.RoutingMonitor", "evaluation.Sweep"),
        *("evaluation.routing_sweep", "exporting.export_model"),
    ),
    "examples/test_pages.py": _cases(
        "test_page_runs",
        *("docs/concepts/recipes.md", "docs/cookbook.md", "docs/faq.md"),
        *("docs/start.md", "docs/pytorch.md"),
    ),
    "experiments/test_letters.py": ("test_program", "test_results"),
    "experiments/test_runs.py": ("test_an_interrupted_run_ends_with_the_same_results",),
    "experiments/test_presets.py": ("test_a_preset_is_trained",),
    "exporting/test_export.py": "test_classes_and_options_of_this_program_only "
    "test_encoders_of_limoe test_experts_of_any_layer "
    "test_fixed_batch_for_groups_of_the_whole_batch test_functional_model_of_a_user "
    "test_pixels test_pixels_of_another_size test_settings_of_routers_as_they_stand "
    "test_what_dense_models_were_trained_with",
    "guards/test_faults.py": ("test_a_planted_fault_is_seen",),
    "guards/test_golden.py": "test_costs[list] "
    "test_predictions_of_the_trained_presets[all]",
    "examples/test_guides.py": ("*",),
    "routers/test_balanced.py": ("test_load_is_even_after_500_steps",),
    "routers/test_recording.py": ("test_inside_a_compiled_function",),
    "test_files.py": ("test_one_process_at_a_time",),
    "test_package.py": ("test_wheel_works_outside_the_checkout",),
    "test_pages.py": "test_no_link_of_the_site_is_dead "
    "test_the_site_loads_nothing_from_another_host "
    "test_the_site_shows_every_recorded_figure test_what_is_generated_is_of_today",
    "test_trained.py": "test_a_word_finds_its_icons_as_the_card_says "
    "test_few_shot_accuracy_is_that_of_the_card "
    "test_few_shot_accuracy_on_digits_is_that_of_the_card "
    "test_int8_keeps_the_accuracy test_presets_know_icons test_presets_know_letters",
    "test_torture.py": "test_a_killed_training_ends_like_another test_memory_stays "
    "test_short_form",
    "training/test_contrastive_recipes.py": ("test_recipe",),
    "reference/test_reference_transport.py": (
        *_cases("test_transport_router", "d_ks_items_odd-converged"),
        *_cases(
            "test_transport_from_ops",
            *("d_ks_experts_odd-k2_converged", "d_sp_items_odd-converged"),
        ),
    ),
    "training/test_pipeline.py": ("test_rand_augment_differs_from_image_to_image",),
    "training/test_finetuning.py": ("test_between_two_trainings",),
    "training/test_paper_recipes.py": _cases(
        "test_recipe",
        *("imagenet_from_scratch", "soft_moe_pretraining", "vmoe_15b_pretraining"),
        "vtab",
    ),
}


def _listed(table):
    """Split the names that are in one text."""
    return {k: v.split() if isinstance(v, str) else v for k, v in table.items()}


ON_ALL, LONG = map(_listed, (ON_ALL, LONG))


def selected(items, folder):
    """Of collected tests those that run on this backend.

    Args:
        items: list of tests, those of one function next to each other.
        folder: `pathlib.Path` of the tests.
    """

    def is_in(table, item, *known):
        names = table.get(item.path.relative_to(folder).as_posix(), ())
        known = {item.name, *known}
        return bool({*known, *(f"{name}@{BACKEND}" for name in known)} & {*names})

    items = [item for item in items if not is_in(LONG, item, item.originalname, "*")]
    if BACKEND == "torch":
        return set(items)
    own = {folder / file for file in ON_ALL}
    named = {item for item in items if is_in(ON_ALL, item)}
    covers = covering(items)
    rest = [
        item
        for item in items
        if item in covers
        and (item.path not in own or is_in(ON_ALL, item, item.originalname))
    ]
    return named | set(shared(rest, folder))


# Rooms with tests of one backend.
_OF_A_BACKEND = ("distribution", "examples", "exporting")


def shared(items, folder):
    """Of cases that PyTorch runs, too, JAX, slow to compile, takes a third.

    TensorFlow takes the rest, or of those of `reference/`, numbers of the papers' own
    code, another third.
    """
    alone = [file for file, backends in RUNS_ON.items() if "torch" not in backends]
    for (path, _), tests in itertools.groupby(
        items, key=lambda i: (i.path, i.originalname)
    ):
        tests = list(tests)
        room = path.parent.name
        if (
            len(tests) == 1
            or room in _OF_A_BACKEND
            or path in map(folder.joinpath, alone)
        ):
            yield from tests
        elif BACKEND == "jax":
            yield from tests[::3]
        elif room == "reference":
            yield from tests[1::3]
        else:
            yield from (test for index, test in enumerate(tests) if index % 3)


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
