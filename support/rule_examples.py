# SPDX-License-Identifier: Apache-2.0
"""Examples of each rule of `nemo2.preflight.checks`, in the order of reports: a recipe that breaks it, and the nearest recipe
that satisfies all rules.

`docs/checks.md` shows what the rule says of the broken recipe. The tests of the rules run both.
"""

from support.rule_cases import Example, example

TP = "strategy.tensor_model_parallel_size"
PP = "strategy.pipeline_model_parallel_size"
VP = "strategy.virtual_pipeline_model_parallel_size"
CP = "strategy.context_parallel_size"
EP = "strategy.expert_model_parallel_size"
ETP = "strategy.expert_tensor_parallel_size"
SP = "strategy.sequence_parallel=True"
FIRST, LAST = "strategy.num_layers_in_first_pipeline_stage", "strategy.num_layers_in_last_pipeline_stage"
SPLIT = "strategy.account_for_embedding_in_pipeline_split"
GROUP = "strategy.microbatch_group_size_per_vp_stage"
BACKEND = "model.config.attention_backend"
GRAPHS = "model.config.cuda_graph_impl"
OVERLAPPED = f"model.config.tp_comm_overlap=True {TP}=2 {SP}"
FULL = "model.config.recompute_granularity=full"
SELECTIVE = "model.config.recompute_granularity=selective"
STOPPING = "'trainer.callbacks=lightning.pytorch.callbacks.EarlyStopping(mode=min,monitor=val_loss)'"
BY_EPOCH = "log.ckpt.every_n_epochs=1 log.ckpt.every_n_train_steps=None log.ckpt.train_time_interval=None"
FP8 = "trainer.plugins.fp8=hybrid"
OFFLOADED = "optim.config.optimizer_cpu_offload=True optim.config.optimizer_offload_fraction=1.0"
AWARE = "optim.config.use_precision_aware_optimizer=True"
TWO_RANKS = "trainer.devices=2 trainer.accelerator=auto"
CORPUS = {"paths": "corpus", "seq_length": 128, "micro_batch_size": 8, "global_batch_size": 16}
"""Arguments of a data module that reads files."""
PROFILED = "PytorchProfilerCallback(start_step=2,end_step=5"
LATER = "PytorchProfilerCallback(start_step=5,end_step=7"
SQUAD = "SquadDataModule(seq_length=512,global_batch_size=16,micro_batch_size=1,tokenizer=ByteTokenizer()"


SIZES_16 = "seq_length=128,global_batch_size=16,micro_batch_size=8"
RECORDS = f"HFDatasetDataModule(path_or_dataset=records,{SIZES_16},tokenizer=ByteTokenizer()"


def packed(size: int = 4096, micro_batch_size: int = 1) -> str:
    """A data module with packed samples."""
    specs = f"PackedSequenceSpecs(packed_sequence_size={size})"
    sizes = f"seq_length=4096,global_batch_size=64,micro_batch_size={micro_batch_size},tokenizer=ByteTokenizer()"
    return f"'data=FineTuningDataModule(dataset_root=chats,{sizes},packed_sequence_specs={specs})'"


EXAMPLES: tuple[Example, ...] = (
    # Types
    example(
        "values-have-their-types",
        "->strategy.sequence_parallel=False",
        assigned=({"strategy.sequence_parallel": "no"}, {}),
    ),
    example("values-have-their-types", assigned=({"trainer.strategy.data_sampler": 5}, {})),
    example("values-have-their-types", "->trainer.max_epochs=1", assigned=({"trainer.max_epochs": 1.5}, {})),
    example("parts-are-no-text", assigned=({"model.tokenizer": "my_tokenizer"}, {})),
    example("parts-are-no-text", "->trainer.plugins=bf16_mixed", assigned=({"trainer.plugins": "bf16_mixed"}, {})),
    # The launch
    example(
        "executor-starts-what-the-trainer-expects",
        assigned=({"trainer.devices": 8}, {"trainer.devices": 8}),
        launched=(4, 8),
    ),
    example("accelerator-is-here", "trainer.accelerator=gpu->auto trainer.devices=2", here=True),
    example("run-name-is-a-folder", "log.name='a run'->a_run"),
    example(
        "resume-directory-is-searched", "resume.resume_from_directory=/runs/base resume.resume_if_exists=False->True"
    ),
    # Sizes
    example("sizes-are-counts", f"{TP}=0->1"),
    example("sizes-are-counts", "trainer.strategy=FSDP2Strategy(context_parallel_size=0)->FSDP2Strategy"),
    example("nodes-and-devices-are-counts", "trainer.num_nodes=0->1"),
    example(
        "megatron-fsdp-runs-what-is-requested",
        "model.config.recompute_granularity=full model.config.recompute_method=uniform model.config.recompute_num_layers=1 "
        f"model.config.distribute_saved_activations=True->False strategy.fsdp=megatron {CP}=1",
    ),
    example(
        "megatron-fsdp-runs-what-is-requested",
        "strategy.ddp.overlap_grad_reduce=False->True strategy.ddp.data_parallel_sharding_strategy=optim strategy.fsdp=megatron "
        f"strategy.ddp.num_distributed_optimizer_instances=2 {CP}=1",
    ),
    example("torch-shards-what-is-requested", f"trainer.strategy=FSDP2Strategy {FP8}->None"),
    example("torch-shards-what-is-requested", "trainer.strategy=FSDP2Strategy(data_parallel_size=3)->FSDP2Strategy"),
    example("torch-shards-what-is-requested", "trainer.strategy=FSDP2Strategy optim.config.optimizer=muon->adam"),
    example(
        "torch-shards-what-is-requested",
        f"trainer.strategy=FSDP2Strategy {AWARE} optim.config.exp_avg_dtype=torch.bfloat16->torch.float32",
    ),
    example(
        "torch-shards-what-is-requested",
        f"trainer.strategy=FSDPStrategy {AWARE} optim.config.optimizer_cpu_offload=True->False "
        "optim.config.optimizer_offload_fraction=1.0",
    ),
    example(
        "torch-shards-what-is-requested", "trainer.strategy=FSDP2Strategy optim.config.overlap_param_gather=True->False"
    ),
    example(
        "torch-shards-what-is-requested",
        f"trainer.strategy=FSDPStrategy {AWARE} optim.config.main_grads_dtype=torch.bfloat16->torch.float32",
    ),
    example("torch-shards-what-is-requested", "trainer.strategy=FSDP2Strategy(tensor_parallel_size=2)->FSDP2Strategy"),
    # Ranks
    example("groups-are-created", f"{CP}=2 model.config.hierarchical_context_parallel_sizes=[2,1]->"),
    example("dense-sizes-divide-the-world", f"{TP}=3->4 ->{CP}=1 ->strategy.sequence_parallel=True"),
    example("expert-sizes-divide-the-world", f"{EP}=16->8", recipe="deepseek_v2_lite"),
    example("replicas-before-stages", f"strategy.use_tp_pp_dp_mapping=True {PP}=2 {CP}=2->1"),
    example("optimizer-instances-divide-the-replicas", f"{CP}=4 strategy.num_distributed_optimizer_instances=3->4"),
    example("optimizer-instances-divide-the-replicas", f"{CP}=4 strategy.ddp.num_distributed_optimizer_instances=3->4"),
    example(
        "optimizer-instances-divide-the-replicas",
        f"{EP}=8 strategy.num_distributed_optimizer_instances=2->1",
        recipe="deepseek_v2_lite",
    ),
    example(
        "optimizer-instances-need-shards",
        "strategy.num_distributed_optimizer_instances=2 optim.config.use_distributed_optimizer=False->True "
        "strategy.ddp.overlap_param_gather=False->",
    ),
    example("something-to-shard", f"strategy.fsdp=megatron {PP}=1 {EP}=8->4", recipe="deepseek_v2_lite"),
    example("something-to-shard", f"strategy.fsdp=megatron {CP}=1 strategy.num_distributed_optimizer_instances=8->2"),
    # The model
    example("model-numbers-are-in-range", "model.config.num_layers=0->1 model.config.layernorm_epsilon=-1->0"),
    example("model-numbers-are-in-range", "model.config.normalization=RMSnorm->RMSNorm"),
    example(
        "model-numbers-are-in-range",
        "model.config.moe_router_load_balancing_type=aux_los->aux_loss",
        recipe="mixtral_8x7b",
    ),
    example(
        "model-numbers-are-in-range",
        assigned=({"model.config.position_embedding_type": "rotary"}, {"model.config.position_embedding_type": "rope"}),
    ),
    example("heads-in-groups", "model.config.num_query_groups=3->4"),
    example("hidden-over-heads", "model.config.hidden_size=4100 ->model.config.kv_channels=128"),
    example("rotary-width-is-even", "model.config.kv_channels=127->128"),
    example("rotary-width-is-even", "model.config.qk_pos_emb_head_dim=63->64", recipe="deepseek_v2_lite"),
    example(
        "weights-are-initialized", "model.config.perform_initialization=False ->resume.restore_config.path=weights"
    ),
    example(
        "fused-activations-have-kernels",
        "model.config.bias_activation_fusion=True->False model.config.gated_linear_unit=False",
    ),
    example(
        "fused-activations-have-kernels",
        "model.config.bias_activation_fusion=True->False model.config.activation_func=torch.nn.functional.gelu",
        recipe="mixtral_8x7b",
    ),
    example(
        "bounded-activation-is-not-fused",
        "model.config.activation_func_clamp_value=7.0 model.config.bias_activation_fusion=True->False",
    ),
    example(
        "activation-settings-have-a-gate",
        "model.config.gated_linear_unit=False-> model.config.glu_linear_offset=1.0 "
        "model.config.bias_activation_fusion=False",
    ),
    example(
        "layer-pattern-has-every-layer",
        "model.config.num_layers=12 ->model.config.hybrid_override_pattern=MMMMMMMMMMMM",
        recipe="mamba2_130m",
    ),
    example("layer-pattern-has-every-layer", "model.config.num_layers=26->", recipe="deepseek_v2_lite"),
    example("layer-pattern-has-every-layer", "model.config.mtp_num_layers=1->None", recipe="nemotronh_4b"),
    # Tensor and sequence parallelism
    example(
        "feed-forward-over-tensor-ranks",
        f"{TP}=2 {SP} model.config.ffn_hidden_size=33 model.config.num_layers=2 model.config.hybrid_override_pattern=-M->*M",
        recipe="nemotronh_8b",
    ),
    example("feed-forward-over-tensor-ranks", f"{TP}=2 model.config.ffn_hidden_size=14335->14336"),
    example("sequence-over-tensor-ranks", f"{TP}=8 {CP}=1 {SP} data.seq_length=8188->8184"),
    example("sequence-over-tensor-ranks", f"{TP}=2 {CP}=2 {SP} data.seq_length=8190->8192"),
    example("loss-reads-slices-of-the-vocabulary", "model.config.parallel_output=False->True"),
    example(
        "latent-attention-over-tensor-ranks",
        f"{TP}=2 strategy.expert_tensor_parallel_size=1 ->{SP}",
        recipe="deepseek_v2_lite",
    ),
    example(
        "latent-attention-over-tensor-ranks",
        f"{TP}=2 strategy.expert_tensor_parallel_size=1 {SP} model.config.num_query_groups=1->2",
        recipe="deepseek_v2_lite",
    ),
    example(
        "gates-over-tensor-ranks",
        f"model.config.attention_output_gate=True->False model.config.num_query_groups=1 {TP}=2",
    ),
    example("mixers-over-tensor-ranks", f"{TP}=8 {SP} model.config.mamba_num_groups=4->8", recipe="mamba2_8b"),
    example("mixers-over-tensor-ranks", f"{TP}=8 {SP} model.config.mamba_num_heads=100->128", recipe="mamba2_8b"),
    example("mixers-over-tensor-ranks", f"{TP}=8 {SP} model.config.mamba_num_groups=24->32", recipe="mamba2_8b"),
    # Context parallelism
    example("sequence-in-twice-the-context-ranks", f"{CP}=4 data.seq_length=8188->8192"),
    example(
        "yarn-positions-in-twice-the-context-ranks",
        f"{CP}=4 model.config.original_max_position_embeddings=4092->4096",
        recipe="deepseek_v2_lite",
    ),
    example("exchange-is-known", "model.config.cp_comm_type=a2a+p2p->a2a"),
    example("exchange-is-known", f"{CP}=2 model.config.cp_comm_type=ring->p2p"),
    example(
        "heads-over-context-ranks", f"model.config.cp_comm_type=a2a {CP}=4->2 {TP}=2 model.config.num_query_groups=4"
    ),
    example("exchange-goes-with-the-attention", f"{CP}=2 ->model.config.cp_comm_type=all_gather", recipe="gemma3_1b"),
    example(
        "mixers-see-whole-sequences",
        f"{CP}=2->1 trainer.devices=2 trainer.accelerator=auto",
        recipe="mamba2_130m",
        here=True,
    ),
    example("delta-nets-are-whole", f"{CP}=2->1", recipe="qwen35_9b"),
    # Attention
    example("back-end-is-left", f"{BACKEND}=unfused->fused {CP}=2"),
    example("largest-scores-have-a-reader", "model.config.qk_clip=True->False"),
    example("latent-attention-has-its-sizes", "model.config.multi_latent_attention=True->False"),
    example(
        "latent-attention-has-settings-of-its-own", "model.config.qk_l2_norm=True->False", recipe="deepseek_v2_lite"
    ),
    example(
        "latent-attention-has-settings-of-its-own",
        "model.config.softmax_scale=0.1->None model.config.position_embedding_type=none->rope",
        recipe="deepseek_v2_lite",
    ),
    example(
        "norms-over-heads-are-rms-norms", "model.config.qk_layernorm_over_heads=True ->model.config.qk_layernorm=True"
    ),
    example("norms-over-heads-are-rms-norms", "model.config.normalization=LayerNorm->RMSNorm", recipe="olmo2_7b"),
    example("hybrid-layers-have-one-norm", "model.config.qk_layernorm=True->False", recipe="nemotronh_4b"),
    example(
        "fused-qkv-rope-rotates-all-layers", "model.config.fused_single_qkv_rope=True model.config.qk_layernorm=True->"
    ),
    # Pipeline parallelism
    example("virtual-stages-need-stages", f"{VP}=2 ->{PP}=4"),
    example("mixers-are-cut-by-number", f"{PP}=4 {SPLIT}=True->", recipe="mamba2_2_7b"),
    example("layers-over-stages", f"{PP}=3->4 trainer.devices=6->8 data.global_batch_size=510->"),
    example("layers-for-every-stage", f"{PP}=2 {FIRST}=40->20"),
    example("layers-for-every-stage", f"{PP}=2 {FIRST}=12 {LAST}=12->20"),
    example("layers-over-virtual-stages", f"{PP}=4 {VP}=2 {FIRST}=5->4 {LAST}=3->4"),
    example("written-stages-are-built", f"{PP}=2 strategy.pipeline_model_parallel_layout='Et*8|t*8|t*8|t*8L' ->{VP}=2"),
    example(
        "written-stages-are-built",
        f"model.config.num_layers=4 model.config.hybrid_override_pattern='MM|MM' ->{PP}=2",
        recipe="mamba2_2_7b",
    ),
    example("written-stages-are-built", f"{PP}=2 {VP}=2->", recipe="mamba2_2_7b"),
    example("stages-send-what-they-hold", f"{PP}=2 strategy.pipeline_dtype=torch.float32->torch.bfloat16"),
    example(
        "two-interleaved-stages-overlap-messages",
        f"{PP}=2 {VP}=2 model.config.overlap_p2p_comm=False->True ->model.config.batch_p2p_comm=False",
    ),
    example("overlapped-messages-are-between-chunks", f"{PP}=4 ->{VP}=2 model.config.overlap_p2p_comm=True"),
    example(
        "messages-overlap-or-batch",
        f"{PP}=4 {VP}=2 model.config.overlap_p2p_comm=True model.config.batch_p2p_comm=True->False",
    ),
    # Experts
    example("experts-over-ranks", f"{EP}=8 model.config.num_moe_experts=60->64", recipe="deepseek_v2_lite"),
    example(
        "expert-width-over-expert-tensor-ranks",
        f"{TP}=2 {ETP}=2 {EP}=4 {SP} model.config.moe_ffn_hidden_size=1407->1408",
        recipe="deepseek_v2_lite",
    ),
    example(
        "expert-width-over-expert-tensor-ranks",
        f"{TP}=2 {ETP}=1 {EP}=4 {SP} model.config.moe_shared_expert_intermediate_size=2815->2816",
        recipe="deepseek_v2_lite",
    ),
    example("experts-cut-only-where-shared", f"{TP}=2 {ETP}=1 {EP}=1->2 {SP}", recipe="deepseek_v2_lite"),
    example(
        "experts-over-tensor-ranks",
        f"{TP}=2 {ETP}=1 model.config.multi_latent_attention=False-> ->{SP}",
        recipe="deepseek_v2_lite",
    ),
    example("best-of-group-needs-plain-router", "model.config.moe_router_fusion=True->False", recipe="deepseek_v2"),
    example("experts-have-no-post-norm", "model.config.post_sublayer_layernorm=True->False", recipe="deepseek_v2_lite"),
    example(
        "padded-experts-within-tokens",
        "model.config.moe_pad_expert_input_to_capacity=True model.config.moe_expert_capacity_factor=11.0->10.5",
        recipe="deepseek_v2_lite",
    ),
    example("router-picks-what-there-is", "model.config.moe_router_topk=65->64", recipe="deepseek_v2_lite"),
    example("router-picks-what-there-is", "model.config.moe_router_num_groups=256->128", recipe="deepseek_v3"),
    example(
        "balancing-losses-have-their-weights",
        "model.config.moe_aux_loss_coeff=[0.1,0.1]->0.1",
        recipe="deepseek_v2_lite",
    ),
    example(
        "balancing-losses-have-their-weights",
        "model.config.moe_router_load_balancing_type=sinkhorn model.config.moe_aux_loss_coeff=0.1->0.0",
        recipe="deepseek_v2_lite",
    ),
    example(
        "shared-experts-have-no-bias",
        "model.config.moe_shared_expert_intermediate_size=512 model.config.add_bias_linear=True->False",
        recipe="deepseek_v2_lite",
    ),
    example(
        "overlapped-exchange-has-no-mixers",
        "model.config.overlap_moe_expert_parallel_comm=True->False",
        recipe="nemotronh_4b",
    ),
    # Batches and sequences
    example("batch-over-replicas", "data.global_batch_size=510->512 data.micro_batch_size=2"),
    example("batch-over-replicas", "data.rampup_batch_size=[30,2,1000]->[32,16,1000]"),
    example("micro-batches-in-groups", f"{PP}=4 {VP}=2 {CP}=1 data.global_batch_size=10->16"),
    example("micro-batches-in-groups", f"{PP}=4 {VP}=2 {GROUP}=2->4"),
    example("one-sequence-length", "model.config.seq_length=4096-> ->data.seq_length=4096"),
    example(
        "samples-for-every-step",
        recipe="llama_tiny",
        corpus=({**CORPUS, "num_train_samples": 100}, {**CORPUS, "num_train_samples": 4800}),
    ),
    example("samples-for-a-step", "data.num_train_samples=100->512"),
    example("samples-for-a-step", "data.num_val_samples=1024 trainer.limit_val_batches=0.2->0.5"),
    example(
        "samples-for-a-step",
        recipe="llama_tiny",
        corpus=({**CORPUS, "num_val_samples": 8}, {**CORPUS, "num_val_samples": 16}),
    ),
    # Fine-tuning data
    example("packs-one-by-one", packed(micro_batch_size=2), packed()),
    example("packs-are-as-long-as-sequences", packed(size=8192), packed()),
    example("packs-count-tokens", f"{packed()} model.config.calculate_per_token_loss=False->"),
    example("packs-are-not-captured", f"{packed()} model.config.cuda_graph_impl=transformer_engine->none"),
    example(
        "packs-reset-the-state",
        f"'data={SQUAD},packed_sequence_specs=PackedSequenceSpecs(packed_sequence_size=512))->{SQUAD})' {TWO_RANKS}",
        recipe="mamba2_130m",
        here=True,
    ),
    example(
        "packs-reset-linear-attention",
        packed(),
        "'data=FineTuningDataModule(dataset_root=chats,seq_length=4096,global_batch_size=64,micro_batch_size=1,"
        "tokenizer=ByteTokenizer())'",
        recipe="qwen35_9b",
    ),
    example(
        "training-samples-are-there",
        "'data=FineTuningDataModule(dataset_root=/dev/null/chats,seq_length=128,global_batch_size=16,micro_batch_size=8)'",
        "'data=SquadDataModule(seq_length=128,global_batch_size=16,micro_batch_size=8,tokenizer=ByteTokenizer())'",
        recipe="llama_tiny",
        here=True,
    ),
    # Fine-tuning
    example(
        "fine-tuning-begins-with-weights",
        "trainer.devices=2 trainer.accelerator=auto ->resume.restore_config.path=hf://organisation/name",
        recipe="mamba2_130m:full",
        here=True,
    ),
    example("peft-settings-are-in-range", "peft.dim=0->1", recipe="llama3_8b:lora"),
    example("peft-fits-the-layers", "peft.target_modules=[linear_qvk]->[linear_qkv]", recipe="llama3_8b:lora"),
    example(
        "one-model-transform",
        "model.model_transform=torch.nn.functional.gelu->None",
        recipe="llama3_8b:lora",
    ),
    example("adapters-read-whole-weights", "trainer.strategy=FSDPStrategy->FSDP2Strategy", recipe="llama3_8b:dora"),
    example("adapters-have-the-models-dtype", "peft.lora_dtype=float32->bfloat16", recipe="llama3_8b:lora"),
    # Overlapped communication
    example(
        "gathered-parameters-are-sharded",
        "strategy.ddp.overlap_param_gather=True optim.config.use_distributed_optimizer=False->True",
    ),
    example(
        "gather-starts-from-reduction",
        "strategy.ddp.overlap_param_gather=True strategy.ddp.overlap_grad_reduce=False->True",
    ),
    example(
        "one-switch-for-the-gather",
        "optim.config.overlap_param_gather=True ->strategy.ddp.overlap_param_gather=True "
        "->strategy.ddp.overlap_grad_reduce=True",
        recipe="llama_tiny",
    ),
    example(
        "one-switch-for-delayed-gradients",
        "strategy.ddp.delay_wgrad_compute=True-> ->model.config.delay_wgrad_compute=True "
        "->model.config.overlap_moe_expert_parallel_comm=True",
        recipe="mixtral_8x7b",
    ),
    example(
        "gather-in-the-step-needs-virtual-stages",
        f"optim.config.overlap_param_gather_with_optimizer_step=True ->{PP}=4 ->{VP}=2 ->{CP}=1 "
        "->strategy.ddp.overlap_param_gather=True ->strategy.ddp.overlap_grad_reduce=True",
    ),
    example(
        "averages-are-of-losses-not-tokens",
        "strategy.ddp.average_in_collective=True->False model.config.calculate_per_token_loss=True",
    ),
    example(
        "fp32-sums-are-of-one-optimizers-shards",
        "strategy.ddp.reduce_scatter_with_fp32_accumulation=True strategy.num_distributed_optimizer_instances=2->1",
    ),
    example("tensor-overlap-needs-sequence-parallel", f"model.config.tp_comm_overlap=True {TP}=2", OVERLAPPED),
    example(
        "userbuffers-carry-the-format",
        f"{OVERLAPPED} trainer.plugins.fp8=hybrid trainer.plugins.fp8_recipe=blockwise->tensorwise",
    ),
    example(
        "userbuffers-have-one-size",
        f"{OVERLAPPED} model.config.moe_token_dispatcher_type=alltoall model.config.variable_seq_lengths=True->False",
    ),
    example(
        "every-projection-has-a-userbuffer",
        f"{OVERLAPPED} strategy.expert_tensor_parallel_size=1",
        f"model.config.tp_comm_overlap=False {TP}=2 {SP} strategy.expert_tensor_parallel_size=1",
        recipe="deepseek_v2_lite",
    ),
    example("buckets-have-elements", "strategy.ddp.bucket_size=0->40000000"),
    example("buckets-have-elements", "strategy.ddp.data_parallel_sharding_strategy=zero3->optim_grads_params"),
    example("overlap-arguments-are-in-range", "trainer.callbacks[1].bucket_size=-1->40000000", recipe="nemotronh_8b"),
    example(
        "overlap-is-asked-for-once",
        "trainer.callbacks[1].overlap_grad_reduce=False-> strategy.ddp.overlap_grad_reduce=True",
        recipe="nemotronh_8b",
    ),
    # Precision
    example("gpu-has-the-format", f"{FP8}", gpu=("A100", "H100")),
    example("gpu-has-the-format", gpu=("V100", "A100")),
    example("gpu-has-the-format", f"{FP8}-> ->trainer.plugins.fp8=None", recipe="llama_tiny", here=True),
    example("products-in-whole-blocks", f"{FP8} {CP}=2 data.seq_length=8180->8192"),
    example("products-in-whole-blocks", f"{FP8} model.config.kv_channels=128 model.config.hidden_size=4104->4112"),
    example(
        "megatron-fsdp-has-no-loss-scaler",
        f"trainer.plugins.precision=16-mixed->bf16-mixed strategy.fsdp=megatron {CP}=1",
    ),
    example(
        "scales-go-into-the-checkpoint",
        f"{FP8} trainer.plugins.fp8_recipe=delayed->tensorwise strategy.fsdp=megatron {CP}=1",
    ),
    example(
        "shared-buffer-needs-fp8-parameters",
        "trainer.plugins.reuse_grad_buf_for_mxfp8_param_ag=True ->trainer.plugins.fp8_param_gather=True "
        f"->{FP8} ->trainer.plugins.fp8_recipe=mxfp8",
    ),
    example(
        "loss-scale-starts-at-its-minimum",
        "trainer.plugins.precision=16-mixed trainer.plugins.fp16_initial_loss_scale=0.5->65536",
    ),
    # Recomputation and offloading
    example(
        "partial-checkpoints-have-a-reader",
        f"model.config.num_microbatches_with_partial_activation_checkpoints=1-> ->{FULL} "
        "->model.config.recompute_method=uniform ->model.config.recompute_num_layers=1",
    ),
    example(
        "full-recomputation-says-how",
        f"{FULL} ->model.config.recompute_method=block ->model.config.recompute_num_layers=4",
    ),
    example(
        "recomputation-is-asked-for",
        f"->{FULL} model.config.recompute_method=block model.config.recompute_num_layers=4",
    ),
    example(
        "recomputed-layers-exist",
        f"{FULL} model.config.recompute_method=block model.config.recompute_num_layers=99->32",
    ),
    example(
        "recomputed-units-fill-the-chunks",
        f"{FULL} model.config.recompute_method=uniform model.config.recompute_num_layers=5->4",
    ),
    example(
        "mtp-recomputes-each-layer",
        f"{FULL} model.config.recompute_method=uniform model.config.recompute_num_layers=2->1",
        recipe="deepseek_v3",
    ),
    example(
        "hybrid-stacks-recompute-nothing",
        f"{FULL}-> ->model.config.recompute_granularity=None model.config.recompute_method=uniform->None "
        "model.config.recompute_num_layers=1->None",
        recipe="nemotronh_8b",
    ),
    # CUDA graphs
    example("graphs-go-with-the-rest", f"{GRAPHS}=transformer_engine strategy.fsdp=megatron-> {CP}=1"),
    example(
        "experts-are-captured-in-part",
        f"{GRAPHS}=transformer_engine ->model.config.moe_pad_expert_input_to_capacity=True "
        "->model.config.moe_expert_capacity_factor=1.0",
        recipe="deepseek_v2_lite",
    ),
    example(
        "captured-steps-are-alike", f"{GRAPHS}=transformer_engine {PP}=2 {CP}=1 data.rampup_batch_size=[32,32,1024]->"
    ),
    example(
        "captured-segments-stay",
        f"{GRAPHS}=transformer_engine",
        environment=(
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "1"},
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "0"},
        ),
    ),
    # Optimizer and learning rate
    example("learning-rate-is-set", "optim.config.lr=None->3e-4"),
    example("schedule-ends-below-its-peak", "optim.config.lr=1e-5 ->optim.lr_scheduler.min_lr=1e-6"),
    example("schedule-ends-below-its-peak", "optim.config.decoupled_lr=1e-6->1e-4"),
    example("final-rate-is-the-schedules", "optim.config.min_lr=1e-6-> ->optim.lr_scheduler.min_lr=1e-6"),
    example(
        "schedule-has-a-length", "trainer.max_steps=-1 ->trainer.max_epochs=1 ->optim.lr_scheduler.max_steps=100000"
    ),
    example("phases-fit-the-schedule", "optim.lr_scheduler.max_steps=1000->100000"),
    example(
        "phases-fit-the-schedule", "optim.lr_scheduler=WarmupHoldAnnealScheduler->PolynomialDecayAnnealingScheduler"
    ),
    example(
        "phases-fit-the-schedule",
        "'optim.lr_scheduler=WarmupHoldAnnealScheduler(warmup_ratio=0.5,hold_ratio=0.8)'",
        "'optim.lr_scheduler=WarmupHoldAnnealScheduler(warmup_ratio=0.01,hold_ratio=0.8)'",
    ),
    example("optimizer-is-known", "optim.config.optimizer=adamw->adam"),
    example("optimizer-is-known", "optim.config.optimizer=adaptive_muon->adam"),
    example(
        "optimizer-is-known",
        "optim.config.optimizer=muon->adam optim.config.use_distributed_optimizer=False",
        recipe="llama_tiny",
        here=True,
    ),
    example("distributed-optimizer-is-adams", "optim.config.optimizer=sgd->adam"),
    example("steps-are-megatron-cores", "trainer.gradient_clip_val=1.0-> ->optim.config.clip_grad=1.0"),
    example("steps-are-megatron-cores", "trainer.accumulate_grad_batches=4-> ->data.global_batch_size=2048"),
    example("steps-are-megatron-cores", "trainer.gradient_clip_algorithm=value-> ->optim.config.clip_grad=0.5"),
    example(
        "offloaded-optimizer-decouples-decay", f"{OFFLOADED} {AWARE} optim.config.decoupled_weight_decay=False->True"
    ),
    example(
        "offloaded-optimizer-is-precision-aware",
        f"{OFFLOADED} optim.config.use_precision_aware_optimizer=False-> ->{AWARE}",
    ),
    example(
        "offloaded-optimizer-is-precision-aware",
        f"{AWARE} optim.config.optimizer_cpu_offload=True",
        f"{OFFLOADED} {AWARE}",
    ),
    example("optimizer-numbers-are-in-range", "optim.config.adam_beta2=1.5->0.95 optim.config.clip_grad=-1->0"),
    # Steps, validation, checkpoints
    example("steps-are-counts", "trainer.max_steps=-10->10"),
    example("steps-are-counts", "trainer.log_every_n_steps=-1->1"),
    example("training-has-steps", "trainer.limit_train_batches=0->1"),
    example("training-has-steps", "trainer.max_time=00:00:00:00->00:00:00:01"),
    example("training-has-steps", "trainer.max_steps=10 trainer.min_steps=11->10"),
    example(
        "training-has-steps",
        "trainer.max_epochs=2 trainer.limit_train_batches=5 trainer.min_steps=11->10",
        recipe="llama_tiny",
    ),
    example("early-stopping-has-a-validation", f"{STOPPING} trainer.limit_val_batches=0->4", recipe="llama_tiny"),
    example("early-stopping-has-a-validation", f"{STOPPING} data.num_val_samples=0->512"),
    example("validation-interval-is-a-count", "trainer.val_check_interval=0->1"),
    example("validation-interval-is-a-count", "trainer.val_check_interval=500.0->500"),
    example("validation-interval-is-a-count", "trainer.check_val_every_n_epoch=0->1"),
    example("intervals-within-an-epoch-fit-it", "trainer.check_val_every_n_epoch=1-> trainer.limit_train_batches=100"),
    example("overfitting-has-one-number-of-batches", "trainer.overfit_batches=2.0->2 trainer.limit_train_batches=2->"),
    example("checkpoints-have-one-switch", "trainer.enable_checkpointing=False-> ->log.ckpt=None"),
    example("checkpoints-have-names-of-their-own", f"{BY_EPOCH} log.ckpt.filename={{epoch}}->{{epoch}}-{{step}}"),
    # Settings
    example("secrets-stay-in-the-environment", assigned=({"log.extra_loggers": [{"api_key": "0123456789"}]}, {})),
    example("paths-are-written-out", "'log.log_dir=$HOME/runs->' ->log.log_dir=/home/me/runs"),
    example("paths-are-written-out", "resume.resume_from_path=->None"),
    example("strategy-settings-are-supported", "strategy.moe_extended_tp=True->False"),
    example("strategy-settings-are-supported", "strategy.init_model_parallel=False->True"),
    example("strategy-settings-are-supported", "strategy.setup_optimizers=False->True"),
    example("strategy-settings-are-supported", "trainer.strategy=ddp->MegatronStrategy"),
    example("precision-is-known", "trainer.plugins.precision=bf61-mixed->bf16-mixed"),
    example("precision-is-known", "trainer.plugins=None trainer.precision=bf61-mixed->bf16-mixed"),
    example("schedule-is-one-curve", "optim.lr_scheduler.warmup_steps=-5->0"),
    example("checkpoint-settings-are-supported", "log.ckpt.filename={epoch}->{epoch}-{step}"),
    example("checkpoint-settings-are-supported", "log.ckpt.save_top_k=-2->-1"),
    example("data-module-accepts-its-arguments", "data.num_workers=-1->0"),
    example("data-module-accepts-its-arguments", assigned=({"data.seed": None}, {"data.seed": 0})),
    example(
        "splits-have-data", recipe="llama_tiny", corpus=({**CORPUS, "split": "100,0,0"}, {**CORPUS, "split": "95,5,0"})
    ),
    example(
        "splits-have-data",
        recipe="llama_tiny",
        corpus=(
            {**CORPUS, "paths": {"validation": "corpus"}},
            {**CORPUS, "paths": {"train": "corpus", "validation": "corpus"}},
        ),
    ),
    example(
        "callbacks-have-their-arguments",
        "trainer.callbacks=GarbageCollectionCallback",
        "trainer.callbacks=GarbageCollectionCallback(gc_interval_train=10,gc_interval_val=10)",
    ),
    example("callbacks-have-their-arguments", "trainer.callbacks=MegatronTokenDropCallback->TimingCallback"),
    example(
        "callbacks-have-their-arguments",
        "'trainer.callbacks=LayerFreezer(schedule=[decoder.layers.99])->LayerFreezer(schedule=[decoder.layers.9])'",
    ),
    example("callbacks-have-their-arguments", "trainer.callbacks=ModelTransform->[]"),
    example(
        "callbacks-have-their-arguments",
        "'trainer.callbacks=EvaluationCallback(texts=[missing.txt])->' ->trainer.callbacks=[]",
        recipe="llama_tiny",
        here=True,
    ),
    example(
        "callbacks-have-their-arguments",
        "'trainer.callbacks=PytorchProfilerCallback(start_step=5,end_step=2)'",
        "'trainer.callbacks=PytorchProfilerCallback(start_step=2,end_step=5)'",
    ),
    example(
        "callbacks-have-their-arguments",
        f"'trainer.callbacks=[{PROFILED},trace_dir=t),{LATER},trace_dir=t)]'",
        f"'trainer.callbacks=[{PROFILED},trace_dir=t),{LATER},trace_dir=u)]'",
    ),
    example(
        "callbacks-have-their-arguments",
        f"'trainer.callbacks=[{PROFILED},trace_dir=t),{PROFILED},trace_dir=u)]'",
        f"'trainer.callbacks=[{PROFILED},trace_dir=t)]'",
    ),
    example(
        "callbacks-have-their-arguments",
        "'trainer.callbacks=lightning.pytorch.callbacks.Timer(duration=4:00)'",
        "'trainer.callbacks=lightning.pytorch.callbacks.Timer(duration=4h)'",
    ),
    example(
        "callbacks-have-their-arguments",
        "'trainer.callbacks=[SpeedMonitor,SpeedMonitor(time_unit=days)]->SpeedMonitor'",
    ),
    example(
        "callbacks-have-their-arguments",
        "'trainer.callbacks=[LossGuard(on_spike=skip),LossGuard(on_nonfinite=skip)]'",
        "'trainer.callbacks=LossGuard(on_spike=skip,on_nonfinite=skip)'",
    ),
    example("callbacks-have-their-arguments", "trainer.callbacks=ModelCheckpoint->TimingCallback"),
    example(
        "callbacks-have-their-arguments",
        "trainer.max_time=00:04:00:00 'trainer.callbacks=lightning.pytorch.callbacks.Timer(duration=4h)'",
        "'trainer.callbacks=lightning.pytorch.callbacks.Timer(duration=4h)'",
    ),
    example("lightning-agrees", "trainer.accelerator=GPU->auto"),
    example("lightning-agrees", "trainer.profiler=simpel->simple"),
    example("lightning-agrees", "trainer.max_time=4:00->00:04:00:00"),
    example("lightning-agrees", "trainer.val_check_interval=1.5->0.5"),
    example("lightning-agrees", "trainer.limit_val_batches=1.5->0.5"),
    example("lightning-agrees", "trainer.barebones=True-> trainer.profiler=simple"),
    example("one-precision-setting", "trainer.precision=bf16-mixed->None"),
    # Settings that must agree
    example("sizes-on-the-strategy", f"model.config.tensor_model_parallel_size=4-> ->{TP}=4 ->{CP}=1"),
    example(
        "one-switch-for-the-distributed-optimizer",
        "optim.config.use_distributed_optimizer=True strategy.ddp.use_distributed_optimizer=False->True",
    ),
    example("one-precision", "trainer.plugins.grad_reduce_in_fp32=True strategy.ddp.grad_reduce_in_fp32=False->"),
    example(
        "one-source-of-optimizer-state", "strategy.ckpt_load_main_params=True ->strategy.ckpt_load_optimizer=False"
    ),
    # Files of this machine
    example("log-directory-is-writable", "log.log_dir=/dev/null/runs->/tmp", recipe="llama_tiny", here=True),
    example(
        "checkpoint-to-resume-exists",
        "resume.resume_from_path=/dev/null/checkpoint->None",
        recipe="llama_tiny",
        here=True,
    ),
    example(
        "released-weights-fit",
        "resume.restore_config.path=hf:///dev/null/weights-> ->resume.restore_config=None",
        recipe="llama_tiny",
        here=True,
    ),
    example("released-weights-fit", "resume.resume_from_path=hf:///dev/null/weights->None", recipe="llama_tiny"),
    example(
        "communicator-settings-exist",
        "strategy.nccl_communicator_config_path=/dev/null/nccl.yaml->None",
        recipe="llama_tiny",
        here=True,
    ),
    example("data-is-there", recipe="llama_tiny", corpus=({**CORPUS, "paths": "/dev/null/corpus"}, None), here=True),
    example("tokenizer-fits-the-vocabulary", "model.config.vocab_size=100->None", recipe="llama_tiny"),
    example(
        "tokenizer-fits-the-vocabulary",
        f"'data={RECORDS},pad_token_id=300)->{RECORDS},pad_token_id=256)'",
        recipe="llama_tiny",
    ),
    example(
        "tokenizer-fits-the-vocabulary",
        f"'data=HFDatasetDataModule(path_or_dataset=ids,{SIZES_16})' ->model.config.vocab_size=2048",
        recipe="llama_tiny",
    ),
    example(
        "text-has-a-tokenizer",
        "'data=DollyDataModule(seq_length=128,global_batch_size=16,micro_batch_size=8)' "
        "resume.restore_config.path=hf:///dev",
        "'data=DollyDataModule(seq_length=128,global_batch_size=16,micro_batch_size=8,tokenizer=ByteTokenizer())'",
        recipe="llama_tiny",
    ),
    # Optional packages
    example(
        "plain-layers-can-do-it",
        "model.config.qk_clip=True->False",
        recipe="llama_tiny",
        here=True,
    ),
    example(
        "dispatcher-is-installed",
        "model.config.moe_token_dispatcher_type=flex->alltoall",
        recipe="mixtral_8x7b",
        launched=(8, 8),
        here=True,
    ),
    example(
        "ring-exchange-is-installed", "model.config.use_ring_exchange_p2p=True->False", recipe="llama_tiny", here=True
    ),
    example(
        "logger-is-installed",
        "log.wandb=lightning.pytorch.loggers.wandb.WandbLogger->None",
        recipe="llama_tiny",
        here=True,
    ),
    example(
        "tracker-can-log-in",
        "log.extra_loggers=[lightning.pytorch.loggers.comet.CometLogger]->[]",
        recipe="llama_tiny",
        here=True,
    ),
    # Environment variables
    example("attention-is-chosen-once", environment=({"NVTE_FLASH_ATTN": "0"}, {"NVTE_FLASH_ATTN": "1"})),
    example(
        "registered-buffers-do-not-move",
        "strategy.ddp.nccl_ub=True",
        environment=({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, {}),
    ),
    example(
        "ucc-overlaps-over-several-connections",
        "strategy.pipeline_model_parallel_size=2 strategy.pipeline_model_parallel_comm_backend=ucc",
        environment=({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}),
    ),
    example(
        "timeout-is-a-number",
        environment=({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "10min"}, {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "600"}),
    ),
    example(
        "deterministic-everywhere",
        "model.config.deterministic_mode=True",
        environment=({}, {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}),
        gpu=("H100", "H100"),
    ),
    # Megatron-Core's own checks
    example(
        "megatron-core-agrees", "model.config.rotary_interleaved=True->False model.config.multi_latent_attention=True->"
    ),
    example(
        "megatron-core-agrees",
        f"{TP}=3->2 {CP}=1 trainer.devices=6 data.global_batch_size=510 model.config.ffn_hidden_size=14352-> "
        "model.config.num_query_groups=1-> model.config.vocab_size=129024->",
    ),
    example(
        "megatron-core-agrees",
        f"{TP}=8 {CP}=1 {SP} model.config.num_attention_heads=24 model.config.num_query_groups=12->8 "
        "model.config.kv_channels=128",
    ),
    example("megatron-core-agrees", "trainer.strategy=FSDP2Strategy model.config.sequence_parallel=True->False"),
    example("megatron-core-agrees", f"{PP}=4 {VP}=3->4"),
    example(
        "megatron-core-agrees", f"{TP}=2 {SP} {EP}=4 model.config.add_bias_linear=True ->{ETP}=1", recipe="mixtral_8x7b"
    ),
    example("megatron-core-agrees", f"{SELECTIVE} model.config.recompute_num_layers=1->"),
    example(
        "megatron-core-agrees", "optim.config.use_precision_aware_optimizer=True->False", recipe="llama_tiny", here=True
    ),
)
