# SPDX-License-Identifier: Apache-2.0
"""The promises of NeMo 2.0's documentation on parallelism, overlap, precision, the distributed optimizer and the bridge
to Lightning, and our own on plans and figures, each with the test that checks it: docs/promises.md.

    python -m tools.promises

Options and their defaults are read off the signatures; a test compares them with the rows, so that no option is without one.
"""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "promises.md"


class Row(NamedTuple):
    """A promise, and where the test stands that holds it: file under ``tests/`` and name."""

    promise: str
    test: str


class Section(NamedTuple):
    """A system: behaviours and documented snippets, then the options of its calls."""

    title: str
    promises: tuple[Row, ...]
    calls: dict[str, dict[str, str]] = {}  # read only
    """The test of each option, by call ("module:name")."""


_RULES = "nemo2/overlap/test_overlap_rules.py"
_VALUES = f"{_RULES}::test_effective_values"
_ALONE = f"{_RULES}::test_all_contradictions_are_told_at_once"
_TP = "nemo2/overlap/test_tp_overlap_cfg.py"
_BUFFERS = "nemo2/overlap/test_userbuffers.py"
_LIMITS = "nemo2/overlap/test_userbuffer_limits.py"
_SNIPPETS = "nemo2/test_what_runs.py::test_the_documents_snippets_run_and_the_effective_configuration_shows_them"
_PRECISION = "nemo2/test_precision.py"
_FP8 = "nemo2/test_fp8.py"
_FORMATS = "tools/test_te_formats.py"
_ADAM = "nemo2/optim/test_distributed_fused_adam.py"
_FORMS = "nemo2/parallel/test_forms.py"
_ANY = "nemo2/strategies/test_any_model.py"
_EACH_OPTION = f"{_ADAM}::test_each_option_sets_its_fields"
_OF_APEX = f"{_ADAM}::test_every_argument_of_apex_is_accepted_at_its_default"
_REFUSED = f"{_ADAM}::test_what_cannot_be_is_refused"
_TOGETHER = f"{_PRECISION}::test_precision_sets_model_optimizer_and_buffers_together"
_OF_FP8 = f"{_FP8}::test_one_value_sets_model_buffers_and_optimizer"
_SCALE = f"{_PRECISION}::test_fp16_steps_that_overflow_move_neither_parameters_nor_the_schedule_and_halve_the_scale"
_ARGUMENTS = f"{_PRECISION}::test_an_argument_reaches_the_configurations_that_have_its_field"
_PARALLEL = "nemo2/parallel/test_megatron_parallel.py"
_LOSS = "nemo2/parallel/test_loss.py"
_MASKED = {
    "validation_step": f"{_LOSS}::test_both_masked_reductions_take_nemos_arguments_and_sum_alike",
    "val_drop_last": "nemo2/strategies/test_evaluation.py::test_every_kept_token_counts_once_whatever_the_global_batch",
    "per_token": f"{_LOSS}::test_shares_of_a_sequence_weigh_by_the_tokens_their_mask_keeps",
}
_SHAPE = f"{_PARALLEL}::test_a_call_hands_its_arguments_to_the_step"
_CALLED = f"{_FORMS}::test_megatron_parallel_called_gives_plain_pytorchs_loss_in_every_way"

_STRATEGY = "nemo2/strategies/test_strategy_arguments.py"
_STAGES = f"{_STRATEGY}::test_stages_hold_the_layers_that_were_asked_for"
_WRITTEN = f"{_STRATEGY}::test_a_run_goes_on_from_a_checkpoint_however_it_was_written"
_FILES = f"{_STRATEGY}::test_files_are_as_many_and_by_whom_as_asked_for"
_NCCL = f"{_STRATEGY}::test_what_is_of_nccl_is_set_aside_on_cpus_and_said"
_USERS = f"{_STRATEGY}::test_devices_environment_writer_and_sampler_are_the_users"
_PROGRESS = f"{_STRATEGY}::test_progress_is_ours_at_the_interval_or_lightnings"
_NUMBERED = f"{_STRATEGY}::test_ranks_are_numbered_and_optimizers_sharded_as_asked_for"
_BITS = "nemo2/test_strategy.py::test_the_stack_trains_bit_by_bit_as_a_bare_megatron_loop"
_TWO_RANKS = "nemo2/models/layers/test_parallel.py::test_two_ranks_train_as_one"
_GONE = "docs/test_from_nemo_page.py::test_what_is_gone_is_on_the_page_and_an_error_that_names_it"
_PARTIAL = "nemo2/checkpoint/test_partial_loads.py"
_LIVE = "nemo2/strategies/test_live_settings.py"
_LAYOUT = "nemo2/parallel/test_layout.py"
_PARITY = "tools/test_parity.py"
_SHARDED = "nemo2/strategies/test_sharded_training.py"

_FSDP = "nemo2/strategies/test_sharded_options.py"
_DOCUMENTED = "nemo2/config/test_documented_settings.py"
_PLANNED = "nemo2/planner/test_recipe.py"
_FIGURES = "docs/test_figures.py"

SECTIONS = (
    Section(
        "Parallelisms",
        (
            Row(
                "every kind of parallelism, alone and combined, trains like one process",
                f"{_PARITY}::test_a_layout_trains_as_one_process_does",
            ),
            Row("FSDP and FSDP2 train like one process", f"{_SHARDED}::test_it_trains_as_one_process_does"),
            Row(
                "`offload_policy`, `parallelize_fn`, `auto_wrap_policy`, `sharding_strategy` and "
                "`cpu_offload` don't change the results",
                f"{_FSDP}::test_where_shards_are_and_what_is_gathered_together_changes_no_number",
            ),
            Row(
                "`mp_policy` and `mixed_precision` take torch's objects",
                f"{_FSDP}::test_torchs_own_policy_of_dtypes_is_used",
            ),
            Row(
                "`custom_tp_plan` shards tensors; `use_hf_tp_plan=False` without a plan raises an error",
                f"{_FSDP}::test_tensors_are_cut_by_the_users_plan_and_by_none_where_there_is_none",
            ),
            Row(
                "an FSDP strategy uses the user's cluster environment, devices, checkpoint IO and data sampler",
                f"{_FSDP}::test_the_users_objects_are_used",
            ),
            Row(
                "FSDP and FSDP2 compute the gradients of one process",
                f"{_SHARDED}::test_every_gradient_is_that_of_one_process",
            ),
            Row(
                "settings written as in NeMo's documentation on parallelism take effect",
                f"{_DOCUMENTED}::test_a_documented_setting_is_what_would_run",
            ),
            Row(
                "`trainer.strategy.expert_model_parallel_size=4` distributes the experts",
                f"{_DOCUMENTED}::test_experts_are_cut_as_documented",
            ),
            Row(
                "mistakes in NeMo's documentation (`sequence_parallelism`, `recompute_method=full`, `trainer.fp8`) raise an "
                "error that names the correct setting",
                f"{_DOCUMENTED}::test_a_documented_mistake_is_refused_with_what_to_write",
            ),
            Row(
                "a layout is valid if Megatron-Core accepts it, and raises an error otherwise",
                f"{_LAYOUT}::test_legal_is_what_megatron_core_accepts",
            ),
            Row(
                "the number of data-parallel replicas is the world size divided by the model-parallel size",
                f"{_LAYOUT}::test_replicas_are_what_is_left_of_the_world",
            ),
            Row(
                "the error for a world that is too small names the size that fits",
                f"{_LAYOUT}::test_a_world_too_small_is_told_the_product_and_the_next_size_that_fits",
            ),
            Row(
                "parallel sizes of a live strategy can be set before a run, such as `strategy.tensor_model_parallel_size = 2`",
                "nemo2/strategies/test_live_settings.py::test_a_run_is_laid_out_by_what_was_set_and_says_so",
            ),
            Row(
                "the attention backend fits the layout and the Transformer Engine version, or an error is raised",
                f"{_FORMATS}::test_a_back_end_that_a_version_does_not_leave_is_refused",
            ),
            Row(
                "stages send activations in their own dtype; another `pipeline_dtype` raises an error",
                f"{_STRATEGY}::test_stages_send_activations_as_they_are",
            ),
        ),
        {
            "nemo2.parallel.layout:Layout": dict.fromkeys(
                ("tp", "pp", "cp", "ep", "etp"), f"{_LAYOUT}::test_legal_is_what_megatron_core_accepts"
            )
            | dict.fromkeys(
                ("vp", "sp"), "nemo2/test_strategy.py::test_the_stack_trains_bit_by_bit_as_a_bare_megatron_loop"
            )
        },
    ),
    Section(
        "Communication overlap",
        (
            Row(
                "data-parallel overlap is on with the distributed optimizer and several replicas, and off with one replica",
                _VALUES,
            ),
            Row(
                "`overlap_grad_reduce` and `overlap_param_gather` don't change the results",
                "nemo2/optim/test_megatron.py::test_overlapping_communication_changes_no_number",
            ),
            Row(
                "tensor-parallel overlap requires TP, sequence parallelism and Transformer Engine; otherwise it is "
                "off, with the reason",
                f"{_RULES}::test_tensor_overlap_is_turned_off_with_the_first_obstacle",
            ),
            Row("pipeline overlap is on with virtual stages; without virtual stages, messages are batched", _VALUES),
            Row(
                "context-parallel messages overlap in every ring exchange",
                f"{_RULES}::test_context_parallel_messages_overlap_wherever_there_is_a_ring",
            ),
            Row(
                "plain attention all-gathers by default, and the run reports that nothing overlaps",
                "nemo2/models/layers/test_attention.py::"
                "test_that_nothing_overlaps_is_said_once_where_no_way_is_asked_for",
            ),
            Row(
                "sliding windows and learned sinks with context parallelism raise an error if the exchange doesn't support them",
                f"{_FORMATS}::test_what_a_version_does_not_exchange_is_refused",
            ),
            Row(
                "19 userbuffers presets have NeMo's names",
                f"{_TP}::test_a_preset_is_under_nemos_name_and_obeys_transformer_engine",
            ),
            Row(
                "the preset is selected by the run's GPU, model size and batch",
                f"{_TP}::test_the_preset_of_a_run_is_found_by_what_it_was_tuned_for",
            ),
            Row(
                "`BulkOverlapCfg`, `RingExchangeOverlapCfg` and `PipelineOverlapCfg` reach Transformer Engine",
                f"{_TP}::test_settings_reach_transformer_engine_without_what_is_unset",
            ),
            Row(
                "a GEMM set to None is off, and its switches follow",
                "nemo2/overlap/test_tp_switches.py::test_none_is_off",
            ),
            Row(
                "`nemo2 explain` shows each switch with its reason",
                f"{_LIMITS}::test_explain_shows_each_switch_with_its_reason",
            ),
            Row(
                "userbuffers work in fit, validate, resume and generate, with every tested Transformer Engine",
                f"{_BUFFERS}::test_a_run_builds_its_layers_over_started_buffers_trains_as_without_and_frees_them",
            ),
            Row(
                "number formats that userbuffers don't support raise an error",
                f"{_LIMITS}::test_a_format_is_refused_where_the_version_refuses_it",
            ),
            Row(
                "batches that don't fit the buffers raise an error",
                f"{_LIMITS}::test_micro_batches_of_another_size_are_refused",
            ),
            Row(
                "documented snippet: remove the overlap callback and append it with `tp_comm_overlap=False`", _SNIPPETS
            ),
            Row("documented snippet: `overlap_p2p_comm=True, batch_p2p_comm=False`", _SNIPPETS),
            Row("documented snippet: `recipe.strategy.ddp_config.overlap_grad_sync = False`", _SNIPPETS),
            Row(
                "`overlap_grad_sync` and `overlap_param_sync` are aliases",
                "nemo2/parallel/test_ddp_config.py::test_both_spellings_are_one_field_of_a_config",
            ),
            Row(
                "two settings that contradict each other raise an error that names both lines",
                f"{_RULES}::test_contradictions_name_both_sources_and_their_lines",
            ),
            Row(
                "a setting without effect is reported once",
                "callbacks/test_megatron_comm_overlap.py::test_what_does_not_take_effect_is_said_once",
            ),
        ),
        {
            "nemo2.callbacks:MegatronCommOverlapCallback": dict.fromkeys(
                (
                    "tp_comm_overlap",
                    "overlap_p2p_comm",
                    "batch_p2p_comm",
                    "overlap_grad_reduce",
                    "overlap_param_gather",
                    "overlap_param_gather_with_optimizer_step",
                    "align_param_gather",
                    "bucket_size",
                    "defer_embedding_wgrad_compute",
                    "wgrad_deferral_limit",
                ),
                _VALUES,
            )
            | {
                "tp_comm_overlap_cfg": "callbacks/test_megatron_comm_overlap.py::"
                "test_the_preset_of_the_run_is_written_where_the_strategy_looks_for_it",
                "tp_comm_bootstrap_backend": f"{_BUFFERS}::test_the_shape_is_that_of_a_micro_batch_on_this_rank",
            }
        },
    ),
    Section(
        "Precision",
        (
            Row("one plugin sets the dtypes of model, optimizer and gradient buffers", _TOGETHER),
            Row(
                "`MegatronMixedPrecision` derives from Lightning's `MixedPrecision`",
                f"{_PRECISION}::test_it_is_lightnings_mixed_precision_without_its_autocast_and_scaler",
            ),
            Row(
                "bf16: parameters have 16 bits, gradients accumulate in fp32",
                f"{_PRECISION}::test_bf16_parameters_accumulate_in_fp32_and_stay_close_to_fp32",
            ),
            Row("fp16: the loss is scaled, and steps that overflow are skipped", _SCALE),
            Row("every factory of `llm.recipes.precision.mixed_precision` works, for bf16 and fp16", _OF_FP8),
            Row(
                "the command line takes a precision factory by name",
                "nemo2/config/test_factories.py::test_every_precision_is_reachable_by_its_name",
            ),
            Row(
                "text in place of a plugin raises an error",
                "nemo2/config/test_factories.py::test_text_set_in_python_is_refused_by_check_and_by_the_run",
            ),
            Row(
                "a number format that the GPU doesn't support raises an error",
                f"{_FP8}::test_the_check_knows_which_generation_has_which_recipe",
            ),
            Row(
                "a number format that Transformer Engine doesn't support raises an error",
                "tools/test_te_calls.py::test_a_recipe_is_refused_where_the_version_has_none",
            ),
            Row(
                "a training step runs in each number format, with each tested Transformer Engine",
                f"{_FORMATS}::test_a_format_that_a_version_has_goes_through_a_step",
            ),
            Row(
                "token counts and widths that aren't a multiple of a format's block size raise an error",
                f"{_FORMATS}::test_a_recipe_of_other_sizes_is_refused",
            ),
            Row(
                "fp8 states in a checkpoint are recognized as data, for every version that saved them",
                f"{_FORMATS}::test_a_real_state_is_found_to_be_data",
            ),
            Row(
                "each version loads these fp8 states",
                f"{_FORMATS}::test_a_state_that_the_version_refuses_is_loaded_with_the_leave_that_we_give",
            ),
            Row(
                "a value set on one config overrides the plugin's default, in all configs",
                f"{_PRECISION}::test_what_is_set_in_one_configuration_holds_for_the_others",
            ),
            Row(
                "a field that the precision plugin decides reads as the value of the run",
                "nemo2/config/test_decided_elsewhere.py::test_every_field_that_another_part_decides_reads_as_what_runs",
            ),
        ),
        {
            "nemo2:MegatronMixedPrecision": {
                "precision": _TOGETHER,
                "params_dtype": f"{_PRECISION}::test_parameters_of_another_dtype_than_the_precisions_are_refused",
            }
            | dict.fromkeys(
                (
                    *("pipeline_dtype", "autocast_dtype", "autocast_enabled", "grad_reduce_in_fp32"),
                    *("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_wgrad", "fp8_params"),
                    *("fp8_dot_product_attention", "fp8_multi_head_attention", "fp4", "fp4_recipe"),
                    *("fp16_loss_scale", "fp16_initial_loss_scale", "fp16_min_loss_scale", "fp16_loss_scale_window"),
                    "fp16_hysteresis",
                ),
                _ARGUMENTS,
            )
            | dict.fromkeys(
                (
                    *("fp8", "fp8_recipe", "first_last_layers_bf16", "fp8_param_gather"),
                    *("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "reuse_grad_buf_for_mxfp8_param_ag"),
                ),
                _OF_FP8,
            )
        },
    ),
    Section(
        "Distributed optimizer",
        (
            Row(
                "`distributed_fused_adam` has the documented defaults", f"{_ADAM}::test_the_defaults_are_the_documents"
            ),
            Row(
                "Apex's defaults together make a valid recipe",
                f"{_ADAM}::test_apexs_defaults_all_at_once_make_a_legal_recipe",
            ),
            Row(
                "the options reach the recipe, and other settings stay",
                f"{_ADAM}::test_a_recipe_gets_the_options_and_keeps_the_rest",
            ),
            Row(
                "the command line takes `optim=distributed_fused_adam_with_cosine_annealing`",
                "nemo2/config/test_factories.py::test_parts_are_made_by_name_and_their_arguments_are_typed",
            ),
            Row(
                "the command line takes `model.optim.name=distributed_fused_adam` and its options",
                "nemo2/config/test_factories.py::test_documented_settings_of_the_optimizer_work_below_the_model",
            ),
            Row(
                "an error never suggests an abstract class",
                "nemo2/config/test_factories.py::test_no_abstract_class_is_ever_suggested",
            ),
            Row(
                "one switch shards the optimizer state over replicas",
                "nemo2/optim/test_megatron.py::test_the_distributed_optimizer_is_one_switch",
            ),
            Row(
                "decoupled weight decay equals torch's",
                f"{_ADAM}::test_decay_with_and_apart_from_the_gradient_is_that_of_torch_on_ranks",
            ),
        ),
        {
            "nemo2.optim.distributed_fused_adam:distributed_fused_adam": dict.fromkeys(
                (
                    "lr",
                    "betas",
                    "eps",
                    "weight_decay",
                    "clip_grad",
                    "dtype",
                    "grad_sync_dtype",
                    "overlap_grad_sync",
                    "overlap_param_sync",
                    "bucket_cap_mb",
                    "average_grad_sync",
                    "nccl_ub",
                    "store_param_remainders",
                    "store_params",
                ),
                _EACH_OPTION,
            )
            | {
                "adam_w_mode": f"{_ADAM}::test_decay_with_and_apart_from_the_gradient_is_that_of_torch_on_ranks",
                "param_sync_dtype": f"{_ADAM}::test_parameters_are_gathered_in_the_dtype_of_the_precision_and_no_other",
                "with_scaled_states": _REFUSED,
            }
            | dict.fromkeys(
                (
                    "contiguous_param_buffer",
                    "contiguous_grad_buffer",
                    "bias_correction",
                    "amsgrad",
                    "capturable",
                    "pipeline_size",
                    "device",
                    "process_group",
                    "distributed_process_group",
                    "redundant_process_group",
                    "disable_distributed_parameters",
                ),
                _OF_APEX,
            )
        },
    ),
    Section(
        "The strategy",
        (
            Row(
                "a second trainer in a process gets process groups of its own layout",
                f"{_STRATEGY}::test_a_second_trainer_gets_the_groups_of_its_own_layout",
            ),
            Row(
                "on GPUs, NCCL settings reach Megatron-Core",
                f"{_STRATEGY}::test_on_gpus_megatron_core_is_given_what_was_asked_for",
            ),
            Row(
                "unsupported values raise an error when they are set",
                f"{_STRATEGY}::test_values_that_nothing_takes_are_refused",
            ),
        ),
        {
            "nemo2.strategy:MegatronStrategy": dict.fromkeys(
                (
                    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "sequence_parallel"),
                    "virtual_pipeline_model_parallel_size",
                ),
                _BITS,
            )
            | dict.fromkeys(
                ("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"), _TWO_RANKS
            )
            | dict.fromkeys(
                (
                    *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
                    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
                    "pipeline_model_parallel_layout",
                ),
                _STAGES,
            )
            | dict.fromkeys(
                (
                    *("moe_extended_tp", "encoder_tensor_model_parallel_size", "encoder_pipeline_model_parallel_size"),
                    *("find_unused_parameters", "lazy_init"),
                ),
                _GONE,
            )
            | dict.fromkeys(
                ("pipeline_model_parallel_comm_backend", "use_sharp", "nccl_communicator_config_path"),
                _NCCL,
            )
            | dict.fromkeys(("data_sampler", "parallel_devices", "cluster_environment", "checkpoint_io"), _USERS)
            | dict.fromkeys(("replace_progress_bar", "progress_interval"), _PROGRESS)
            | dict.fromkeys(("ckpt_torch_dist_multiproc", "ckpt_parallel_save"), _FILES)
            | dict.fromkeys(("use_tp_pp_dp_mapping", "num_distributed_optimizer_instances"), _NUMBERED)
            | {
                "microbatch_group_size_per_vp_stage": f"{_STRATEGY}::"
                "test_a_virtual_stage_runs_as_many_micro_batches_in_a_row_as_asked_for",
                "ckpt_load_optimizer": "nemo2/checkpoint/test_io.py::test_the_comparison_notices_what_is_dropped",
                "ckpt_save_optimizer": f"{_STRATEGY}::test_without_its_optimizer_a_run_goes_on_from_the_weights",
                "ckpt_load_main_params": f"{_PARTIAL}::test_fp32_parameters_are_taken_over_and_nothing_else_of_the_optimizer",
                "ckpt_load_strictness": f"{_PARTIAL}::test_how_strictly_names_have_to_match_is_the_users_to_say",
                "ddp": "nemo2/parallel/test_ddp_config.py::test_both_spellings_are_one_field_of_a_config",
                "fsdp": "nemo2/strategies/test_fsdp_options.py::"
                "test_what_one_rank_alone_holds_is_not_left_to_megatron_fsdp",
                "pipeline_dtype": f"{_STRATEGY}::test_stages_send_activations_as_they_are",
                "use_te_rng_tracker": "nemo2/explain/test_explain.py::"
                "test_graphs_and_what_follows_from_them_are_explained_for_a_gpu",
                "save_ckpt_format": f"{_STRATEGY}::test_values_that_nothing_takes_are_refused",
                "ckpt_async_save": "nemo2/checkpoint/test_io.py::test_saving_does_not_disturb_training",
                "ckpt_assume_constant_structure": f"{_STRATEGY}::"
                "test_a_constant_structure_is_planned_until_two_plans_are_alike",
                "ckpt_parallel_save_within_dp": f"{_STRATEGY}::test_writing_is_shared_in_the_world_or_among_replicas",
                "ckpt_parallel_load": _WRITTEN,
                "ckpt_parallel_save_optim": "nemo2/strategies/test_sharded_checkpoints.py::"
                "test_optimizer_state_for_one_layout_only_is_refused_with_the_way_out",
                "ckpt_load_directly_on_device": f"{_STRATEGY}::test_arguments_of_the_checkpoint_io_reach_it",
                "setup_optimizers": f"{_STRATEGY}::test_a_module_may_do_its_own_updates",
                "init_model_parallel": f"{_STRATEGY}::test_groups_that_somebody_else_has_made_are_used_and_compared",
                "restore_config": "nemo2/hugging_face/test_starting.py::test_each_path_begins_with_the_released_weights",
                "megatron_log_level": f"{_STRATEGY}::test_megatron_cores_timers_are_told_up_to_the_level",
                "use_gloo_process_groups": f"{_STRATEGY}::test_gloo_groups_are_made_unless_they_are_not_wanted",
                "gradient_as_bucket_view": f"{_LIVE}::test_a_name_that_means_nothing_and_one_that_is_too_late_are_refused",
                "ckpt_save_part": "nemo2/checkpoint/test_parts.py::test_a_part_holds_what_is_trained_by_its_full_name",
            }
        },
    ),
    Section(
        "Bridge between Lightning and Megatron-Core",
        (
            Row(
                "a Lightning script gets model parallelism from its strategy, and trains like a bare Megatron loop bit for bit",
                "nemo2/test_strategy.py::test_the_stack_trains_bit_by_bit_as_a_bare_megatron_loop",
            ),
            Row(
                "a user's own module trains like a plain loop",
                "nemo2/strategies/test_any_model.py::test_an_mlp_of_ones_own_trains_as_one_loop_does",
            ),
            Row(
                "the parallel sizes of a live strategy are readable",
                "nemo2/strategies/test_live_settings.py::test_arguments_are_readable_under_their_names",
            ),
            Row(
                "a module may define `forward_step(self, batch)` or `forward_step(self, model, batch)`",
                f"{_FORMS}::test_a_forward_step_with_and_without_the_model_trains_the_same",
            ),
            Row(
                "`training_loss_reduction` may be a property or a method; `loss_reduction(self, model)` works too",
                f"{_FORMS}::test_a_reduction_of_the_users_is_used_in_either_form",
            ),
            Row(
                "`validation_loss_reduction(self, model)` may return `model.validation_loss_reduction()`",
                f"{_FORMS}::test_a_reduction_that_asks_the_model_gets_the_one_that_it_overrides",
            ),
            Row(
                "`recipe.strategy.ddp_config.overlap_grad_sync = False` works on every fine-tuning recipe",
                "nemo2/config/test_text_forms.py"
                "::test_the_first_sentence_of_the_documentation_holds_for_every_fine_tuning_recipe",
            ),
            Row(
                "a module of your own may ask for its pipeline stage (`parallel_state.is_pipeline_first_stage()`)",
                f"{_ANY}::test_the_same_mlp_in_two_pipeline_stages",
            ),
            Row(
                "a module of your own may use `ColumnParallelLinear` and `RowParallelLinear`, and gather values for its own loss",
                f"{_ANY}::test_the_same_mlp_of_parallel_linears_with_its_own_loss",
            ),
            Row(
                "`model_transform=lambda m: llm.fn.walk(m, wrap)` trains a model whose modules are wrapped",
                "nemo2/parallel/test_module_functions.py::test_a_model_whose_modules_are_wrapped_by_a_walk_trains",
            ),
            Row(
                "LoRA, DoRA, their canonical forms and full fine-tuning, also of packed samples, continue after a kill as if "
                "there had been none",
                "nemo2/llm/test_resume_from_weights.py"
                "::test_a_resumed_run_has_the_tokenizer_and_the_losses_of_an_uninterrupted_one",
            ),
            Row(
                "a checkpoint continues the same training in another layout or strategy",
                "nemo2/checkpoint/test_reshard.py::test_a_checkpoint_is_the_same_training_in_another_layout",
            ),
            Row(
                "`MaskedTokenLossReduction` is the mean over all unmasked tokens",
                "nemo2/parallel/test_loss.py::test_the_reported_loss_is_the_mean_over_all_kept_tokens_of_all_replicas",
            ),
            Row(
                "`MaskedTokenLossReductionWithLossMask` uses the model's mask instead of the batch's",
                f"{_FORMS}::test_a_mask_that_the_model_returns_decides",
            ),
            Row(
                "`MaskedTokenLossReductionWithLossMask` works over context-parallel ranks",
                f"{_FORMS}::test_a_mask_that_the_model_returns_is_counted_over_shares_of_a_sequence",
            ),
            Row(
                "`get_batch_on_this_context_parallel_rank` slices a batch like Megatron-Core",
                f"{_FORMS}::test_a_share_of_the_sequence_is_megatron_cores_and_knows_the_whole_count",
            ),
            Row(
                "`get_packed_seq_params` reads the boundaries of packed sequences from `cu_seqlens`",
                f"{_FORMS}::test_packed_sequences_begin_and_end_where_cu_seqlens_says",
            ),
            Row(
                "the step calls its hooks in the documented order, with the arguments that they name",
                "nemo2/parallel/test_hooks.py::test_a_real_step_calls_them_in_the_documented_order",
            ),
            Row(
                "a step is split into micro-batches, and calls the module's own step methods",
                "nemo2/parallel/"
                "test_megatron_parallel.py::test_a_modules_own_steps_are_used_micro_batch_by_micro_batch",
            ),
            Row(
                "`val_drop_last=False` counts every token once, also with a user's own loss reduction",
                "nemo2/strategies/test_evaluation.py::test_every_kept_token_counts_once_whatever_the_global_batch",
            ),
            Row(
                "`trainer.test` prints its own result line",
                "nemo2/strategies/test_evaluation.py::test_a_test_has_a_line_of_its_own",
            ),
            Row(
                "a GPT model with `strategy='ddp'` raises an error that names the strategy it needs",
                "nemo2/strategies/test_evaluation.py::test_a_gpt_under_lightnings_own_strategies_says_what_it_needs",
            ),
            Row(
                "Megatron's samplers sample the data of any loader",
                "nemo2/test_user_module.py::test_two_replicas_train_as_one_loop_on_whole_batches",
            ),
        ),
        {
            "nemo2.parallel.loss:MaskedTokenLossReduction": _MASKED,
            "nemo2.parallel.loss:MaskedTokenLossReductionWithLossMask": _MASKED,
            "nemo2.parallel.megatron_parallel:MegatronParallel": dict.fromkeys(
                (
                    *("pipeline", "precision_plugin", "callbacks", "data_step", "forward_step", "loss_reduction"),
                    *("vp_size", "ddp_config", "device", "wrap_chunk", "transform", "cpu"),
                ),
                f"{_PARALLEL}::test_each_argument_of_the_constructor_does_what_it_says",
            ),
            "nemo2.parallel.megatron_parallel:MegatronParallel.forward": dict.fromkeys(
                ("data", "data_step", "forward_step", "loss_reduction", "wrap_forward_step"), _CALLED
            )
            | dict.fromkeys(("forward_only", "seq_length", "micro_batch_size", "num_microbatches", "step_i"), _SHAPE),
        },
    ),
    Section(
        "Recomputation and offloading in plans",
        (
            Row(
                "`recompute_method=block`: `recompute_num_layers` trades time for memory layer by layer",
                f"{_PLANNED}::test_blocks_trade_time_for_memory_layer_by_layer",
            ),
            Row(
                "`recompute_method=uniform`: each group of layers keeps one input, and is in memory as a whole "
                "during recomputation",
                f"{_PLANNED}::test_groups_keep_fewer_inputs_and_are_whole_longer",
            ),
            Row(
                "`cpu_offloading`: activations of offloaded layers don't count as GPU memory, and `plan` "
                "names the copies that it doesn't count",
                f"{_PLANNED}::test_offloaded_activations_are_not_counted_on_the_gpu_and_their_copies_are_told",
            ),
            Row(
                "overrides that a search proposes reset the recipe's recomputation and offloading",
                "nemo2/planner/test_search.py::test_overrides_undo_what_the_recipe_recomputes_or_offloads",
            ),
            Row(
                "predicted activation memory is close to that of the real layers",
                "nemo2/planner/test_against_rehearsal.py::test_activations_are_near_what_the_real_layers_keep",
            ),
        ),
    ),
    Section(
        "Figures",
        (
            Row(
                "the page of `show-layout` has one bubble figure, and one meaning per color",
                "nemo2/test_cli_layout.py::test_the_page_has_one_bubble_and_a_colour_means_one_thing",
            ),
            Row(
                "the timeline of `show-layout` equals Megatron-Core's schedule on real ranks",
                "nemo2/pictures/test_schedule.py::test_the_timeline_is_what_megatron_core_does_on_real_ranks",
            ),
            Row(
                "the groups of `show-layout` equal Megatron-Core's process groups",
                "nemo2/pictures/test_ranks.py::test_groups_are_those_that_megatron_core_makes",
            ),
            Row(
                "figures on pages are up to date, and a changed figure fails a test",
                f"{_FIGURES}::test_figures_are_current_and_a_changed_one_is_noticed",
            ),
            Row(
                "each figure is on a page that describes it",
                f"{_FIGURES}::test_every_figure_is_shown_on_a_page_and_described_there",
            ),
            Row(
                "each figure is readable at 400 px width and names the classes and functions that it shows",
                f"{_FIGURES}::test_a_figure_is_readable_on_a_phone_and_names_what_it_shows",
            ),
            Row(
                "report pages are readable in light and dark themes",
                "nemo2/pictures/test_kit.py::test_every_fill_a_picture_may_name_is_in_the_stylesheet_for_both_themes",
            ),
            Row(
                "wide tables and figures scroll on a narrow screen",
                "nemo2/pictures/test_kit.py::test_on_a_narrow_screen_tables_and_pictures_scroll",
            ),
        ),
    ),
)


def signature_of(call: str) -> dict[str, Any]:
    """The options of a call by name, with their defaults; ``inspect.Parameter.empty`` for those without."""
    module, _, path = call.partition(":")
    found: Any = __import__(module, fromlist=["*"])
    for part in path.split("."):
        found = getattr(found, part)
    parameters = inspect.signature(found).parameters.values()
    return {one.name: one.default for one in parameters if one.name != "self"}


def rows(section: Section) -> Iterator[tuple[str, str]]:
    """Promise and test; options at the end, with the defaults that the code has."""
    yield from section.promises
    for call, tests in section.calls.items():
        name = call.partition(":")[2]
        for option, default in signature_of(call).items():
            said = "" if default is inspect.Parameter.empty else f", default {default!r}"
            yield f"`{name}({option}=...)`{said}", tests[option]


def page(told: Callable[[Section], Iterator[tuple[str, str]]] = rows) -> str:
    lines = [_HEAD]
    for section in SECTIONS:
        lines += ["", f"## {section.title}", "", "| promise | test |", "|---|---|"]
        lines += [
            f"| {promise} | `{test.rpartition('/')[2].replace('::', '` `')}` |" for promise, test in told(section)
        ]
    return "\n".join(lines) + "\n"


_HEAD = """# What NeMo's documentation promises

<!-- Written by `python -m tools.promises`; a test compares. -->

This page lists the promises of NeMo 2.0's documentation that nemo2 keeps, and the test that checks each promise. The promises
cover parallelism, communication overlap, precision, the distributed optimizer, the strategy, and the bridge between Lightning and
Megatron-Core. The last two sections list our own promises on plans and figures.

The second column names a test's file and function below `tests/`. Options and defaults come from the signatures in the code. If
nemo2 rejects an option, the test checks the error."""


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
