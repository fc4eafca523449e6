"""Every field of Megatron's TransformerConfig that no row of the support table sets, and why it need not be there.

test_fields.py walks the fields of the megatron-core at hand: one that is neither in a row nor here is new, and fails
until somebody has looked what it means for a dispatcher.
"""

# Where to look -> names. "Elsewhere" means: neither Megatron's alltoall dispatcher nor what calls it reads the field.
BY_REASON = {
    "set by the tiny model of every training in the table": """
        num_moe_experts hidden_size ffn_hidden_size num_attention_heads gated_linear_unit activation_func
        tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size expert_tensor_parallel_size
        sequence_parallel use_cpu_initialization attention_dropout hidden_dropout masked_softmax_fusion
        bias_activation_fusion bias_dropout_fusion gradient_accumulation_fusion params_dtype pipeline_dtype
        finalize_model_grads_func grad_scale_func""",
    "refused where it cannot work: test_config.py": """
        cuda_graph_impl cuda_graph_scope cuda_graph_modules enable_cuda_graph external_cuda_graph
        moe_pad_experts_for_cuda_graph_inference""",
    "the row `router padding for fp8` sets it after the config is built": """
        moe_router_padding_for_quantization moe_router_padding_for_fp8 fp8 fp8_recipe""",
    "another name of a setting in the table": "moe_layer_recompute",
    "of Megatron's flex dispatcher; its alltoall dispatcher reads none, and a layer that asks for flex is refused": """
        moe_enable_deepep moe_deepep_num_sms moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms
        moe_hybridep_num_sms moe_hybridep_num_sms_preprocessing moe_hybridep_num_blocks_permute
        moe_hybridep_num_blocks_unpermute moe_hybridep_pad_uneven_dispatch_inputs moe_permute_fusion_into_hybridep
        moe_ncclep_static_shape moe_ncclep_zero_copy moe_expert_rank_capacity_factor moe_paged_stash
        moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu""",
    "elsewhere: the router's update, the report's form": """
        moe_router_bias_update_rate moe_router_quantile_balancing_ema moe_per_layer_logging moe_grad_scale_func""",
    "elsewhere: inside the experts and the shared experts, which get rows and return rows": """
        moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size moe_single_grouped_bias
        moe_single_grouped_weight moe_use_legacy_grouped_gemm use_grouped_gemm_for_shared_expert
        use_grouped_gemm_for_dense_mlp activation_func_clamp_value activation_func_fp8_input_store glu_linear_offset
        use_te_activation_func use_fused_weighted_squared_relu use_transformer_engine_op_fuser
        expert_tensor_parallel_num_weight_shards expert_gtp_weight_remat_size tensor_parallel_num_weight_shards
        gtp_weight_remat_size""",
    "read by nothing in Megatron": "moe_token_dropping moe_extended_tp",
    "the combined 1F1B schedule's and the weight gradients' order; test_dispatcher.py frees what they free": """
        delay_wgrad_compute overlap_dispatch_backward_with_experts_wgrad ep_overlap_early_attn_memory_release
        high_priority_a2a_comm_stream""",
    "offloading of what autograd saved, and of the experts' input, which test_dispatcher.py frees": """
        cpu_offloading cpu_offloading_activations cpu_offloading_double_buffering cpu_offloading_num_layers
        cpu_offloading_retain_pinned_cpu_buffers cpu_offloading_weights _cpu_offloading_context
        fine_grained_activation_offloading fine_grained_offloading_max_inflight_offloads offload_modules
        min_offloaded_tensor_size delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks
        activation_offload_fraction""",
    "only while text is generated, by dispatchers of their own": """
        inference_cuda_graph_scope inference_disable_triton_nvls_kernels inference_fuse_tp_communication
        inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
        inference_rng_tracker inference_sampling_seed use_inference_optimized_layers flash_decode
        mlp_chunks_for_prefill nccl_all_reduce_for_prefill symmetric_ar_type""",
    "elsewhere: graphs, once it is settled what is captured": """
        cuda_graph_retain_backward_graph cuda_graph_use_single_mempool cuda_graph_warmup_steps""",
    "elsewhere: attention, state-space layers, positions, context parallelism; tokens are counted in each forward": """
        add_qkv_bias apply_query_key_layer_scaling apply_rope_fusion attention_backend attention_output_gate
        attention_softmax_in_fp32 context_parallel_size cp_comm_type hierarchical_context_parallel_sizes
        hybrid_context_parallel max_seqlen_per_dp_cp_rank variable_seq_lengths dsa_indexer_head_dim
        dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 dsa_indexer_loss_coeff dsa_indexer_n_heads
        dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu
        dsa_indexer_skip_topk_offset dsa_indexer_topk dsa_indexer_topk_freq dsa_indexer_use_sparse_loss
        dsa_kernel_backend experimental_attention_variant experimental_attention_variant_loss_scale_func
        flash_attention_version fused_single_qkv_rope kitchen_attention_backend use_kitchen use_kitchen_attention
        kv_channels linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads
        linear_num_value_heads linear_value_head_dim log_max_attention_logit is_hybrid_model mamba_head_dim
        mamba_num_groups mamba_num_heads mamba_state_dim mamba_training_ssm_states_dtype use_mamba_mem_eff_path
        mrope_section multi_latent_attention no_rope_freq num_query_groups qk_clip qk_clip_alpha qk_clip_threshold
        qk_l2_norm qk_layernorm rotary_interleaved softmax_scale softmax_type test_mode window_attn_skip_freq
        window_size""",
    "elsewhere: norms, residuals, embeddings, loss, initial values, multi-token prediction's form": """
        apply_residual_connection_post_layernorm clone_scatter_output_in_embedding cross_entropy_fusion_impl
        cross_entropy_loss_fusion embedding_init_method embedding_init_method_std fp32_residual_connection
        fused_residual_rmsnorm heterogeneous_block_specs hetereogenous_dist_checkpoint init_method init_method_std
        init_model_with_meta_device layernorm_epsilon layernorm_zero_centered_gamma memory_efficient_layer_norm
        mtp_detach_heads mtp_grad_scale_func mtp_hybrid_override_pattern mtp_standalone mtp_use_repeated_layer
        mup_attn_scale_power mup_base_head_dim mup_base_hidden_size mup_embedding_mult mup_output_mult mup_width_mult
        use_mup normalization output_layer_init_method perform_initialization persist_layer_norm transformer_impl""",
    "elsewhere: precision of the GEMMs; rows keep their dtype, probabilities are fp32": """
        autocast_dtype enable_autocast disable_bf16_reduced_precision_matmul disable_parameter_transpose_cache
        first_last_layers_bf16 num_layers_at_end_in_bf16 num_layers_at_start_in_bf16 fp4 fp4_param
        fp4_quantizer_factory fp4_recipe fp8_amax_compute_algo fp8_amax_history_len fp8_dot_product_attention
        fp8_interval fp8_margin fp8_multi_head_attention fp8_output_proj fp8_param fp8_quantizer_factory fp8_wgrad
        quant_recipe tp_only_amax_red""",
    "here always so: sums are in slot order, bit by bit": "deterministic_mode batch_invariant_mode",
    "elsewhere: how the dense part of the model is split, scheduled and timed": """
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
        async_tensor_model_parallel_allreduce barrier_with_L1_time batch_p2p_comm batch_p2p_sync config_logger_dir
        deallocate_pipeline_outputs defer_embedding_wgrad_compute distribute_saved_activations grad_sync_func
        microbatch_group_size_per_vp_stage no_sync_func num_layers_in_first_pipeline_stage
        num_layers_in_last_pipeline_stage num_microbatches_with_partial_activation_checkpoints overlap_p2p_comm
        overlap_p2p_comm_warmup_flush param_sync_func pipeline_model_parallel_comm_backend
        pipeline_model_parallel_layout timers tp_comm_atomic_ag tp_comm_atomic_rs tp_comm_bootstrap_backend
        tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap tp_comm_overlap_ag tp_comm_overlap_disable_fc1
        tp_comm_overlap_disable_qkv tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs
        use_ring_exchange_p2p use_te_rng_tracker wgrad_deferral_limit""",
}
NOT_IN_THE_TABLE = [name for names in BY_REASON.values() for name in names.split()]
