"""Every name of verl that this package relies on, in one table; `verl-drmas doctor` and the tests walk it.

A plugin that overrides stages of a trainer breaks when they are renamed. Here such a change is one line that names what
moved, instead of a stack trace in the middle of a run.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_drmas.compat_name import Name, check_name

_V1 = "verl.trainer.ppo.v1"
_LOOP = "verl.experimental.agent_loop.agent_loop"
_VLLM = "verl.workers.rollout.vllm_rollout"

NAMES: tuple[Name, ...] = (
    # -- registration
    Name("verl.trainer.ppo.core_algos", "register_adv_est", "registering the estimators", "name_or_enum"),
    Name("verl.trainer.ppo.core_algos", "get_adv_estimator_fn", "verl's own estimators per agent", "name_or_enum"),
    Name("verl.trainer.ppo.core_algos", "ADV_ESTIMATOR_REGISTRY", "the doctor's look at the estimators"),
    Name(
        f"{_V1}.utils",
        "compute_advantage_for_multi_trajectories",
        "replaying a dumped step",
        "data batch_keys adv_estimator gamma lam num_repeat norm_adv_by_std_in_grpo config",
    ),
    Name("verl.protocol", "DataProto", "replaying a dumped step", "batch non_tensor_batch"),
    Name(f"{_V1}.trainer_base", "register_trainer", "registering the trainer", "name"),
    Name(f"{_V1}.trainer_base", "TRAINER_REGISTRY", "the doctor's look at the trainers"),
    Name(_LOOP, "register", "registering the agent loop", "agent_name"),
    Name("verl.workers.engine.base", "EngineRegistry.register", "the CPU engine", "model_type backend device"),
    Name("verl.plugin.platform", "PlatformRegistry.register", "the CPU platform", "platform"),
    # -- tools
    Name(_LOOP, "ToolListWrap", "the tools that verl's worker has loaded"),
    Name(
        "verl.experimental.agent_loop.tool_parser",
        "ToolParser",
        "reading calls in the model's own format",
        members={
            "get_tool_parser": "name tokenizer",
            "extract_tool_calls": "responses_ids tools",
            "stop_token_ids": "",
        },
        attributes="tokenizer",
    ),
    Name("verl.experimental.agent_loop.tool_parser", "FunctionCall", "calls as verl's parsers give them"),
    Name(
        "verl.tools.base_tool",
        "BaseTool",
        "tools of verl's registry",
        members={"create": "", "execute": "instance_id parameters", "release": "instance_id"},
        attributes="name tool_schema",
    ),
    Name("verl.tools.function_tool", "FunctionTool", "function tools of verl's registry", members={"call": ""}),
    Name("verl.tools.function_tool", "normalize_function_tool_return", "what a function tool gives"),
    Name("verl.tools.schemas", "OpenAIFunctionToolSchema", "schemas as verl's parsers take them"),
    Name("verl.tools.schemas", "ToolResponse", "what a tool gives", members={"is_empty": ""}),
    # -- data
    Name("verl.trainer.ppo.utils", "create_rl_dataset", "a data set a stage", "data_paths data_config tokenizer"),
    Name("verl.utils.dataset.rl_dataset", "collate_fn", "batches of a curriculum"),
    Name(
        "verl.utils.dataset.rl_dataset",
        "RLHFDataset",
        "prompts of single agents on verl's own loops",
        "data_files tokenizer config",
        {"_build_messages": "example key"},
    ),
    # -- trainer
    Name(
        f"{_V1}.trainer_sync",
        "PPOTrainerSync",
        "the team trainer and its policies",
        "config",
        {
            "_balance_batch": "batch metrics",
            "_build_replay_buffer": "",
            "_compute_advantage": "batch metrics",
            "_compute_old_log_prob": "batch metrics",
            "_compute_ref_log_prob": "batch metrics",
            "_dump_generations": "inputs outputs gts scores reward_extra_infos_dict dump_path",
            "_get_n_gpus_for_throughput": "",
            "_get_required_batch_multiple": "dp_size",
            "_init_dataloader": "",
            "_init_dump_executor": "",
            "_init_resource_pool_mgr": "",
            "_init_tokenizer": "",
            "_load_checkpoint": "",
            "_log_rollout_data": "batch timing_raw rollout_data_dir",
            "_maybe_log_val_generations": "inputs outputs scores",
            "_rollout_server_managers": "",
            "_shutdown_dump_executor": "",
            "_submit_batch_to_rollout": "batch",
            "_save_checkpoint": "",
            "_setup": "",
            "_step_once": "metrics timing_raw sample_batch_size",
            "_update_actor": "batch metrics",
            "_validate": "",
            "_val_metrics_update": "data_sources sample_uids reward_extra_infos_dict sample_turns expected_acc_counts",
            "fit": "agent_loop_manager",
            "get_llm_client": "",
            "on_init_end": "",
            "on_sample_begin": "",
            "on_sample_end": "",
            "on_step_end": "",
            "on_validate_begin": "",
            "prepare_step": "",
            "step": "metrics timing_raw",
        },
        "_enable_hybrid_replicas _pending_sync_metrics actor_rollout_wg agent_loop_manager checkpoint_callback "
        "checkpoint_manager config distillation_config global_steps kl_ctrl_in_reward llm_server_manager "
        "ref_policy_wg resource_pool_manager reward_loop_manager role_worker_mapping teacher_model_manager "
        "processor replay_buffer steps_per_epoch tokenizer total_training_steps train_dataloader train_dataloader_it "
        "train_dataset trainer_mode use_reference_policy val_dataloader val_dataset",
    ),
    Name(
        f"{_V1}.replay_buffer",
        "ReplayBuffer",
        "poll interval and stall time-out",
        "poll_interval",
        {"_wait_for_next_poll": "partition_id last_debug_time", "sample": "partition_id"},
        "failure_keys finished_keys partitions poll_interval running_keys",
    ),
    Name("verl.experimental.reward_loop", "RewardLoopManager", "rewards of stock agent loops", "config"),
    Name("verl.utils.tensordict_utils", "list_of_dict_to_tensordict", "rows of another job's sessions"),
    Name("verl.workers.utils.padding", "response_to_nested", "row weights in the loss"),
    Name("verl.trainer.ppo.utils", "need_reference_policy", "a policy's configuration", "config"),
    Name(
        "verl.utils.config",
        "validate_config",
        "a policy's configuration",
        "config use_reference_policy use_critic",
    ),
    Name(
        "verl.trainer.ppo.checkpoint_callback",
        "CheckpointCallback",
        "telling the user's callback of a save",
        members={"on_save": "trainer global_step checkpoint_dir async_save"},
    ),
    Name("verl.trainer.ppo.core_algos", "AdaptiveKLController", "resuming the KL coefficient", attributes="value"),
    Name(
        "verl.trainer.ppo.rollout_corr_helper",
        "compute_offpolicy_metrics",
        "engine against trainer, model by model",
        "old_log_prob rollout_log_prob response_mask",
    ),
    Name("verl.utils.device", "get_resource_name", "whether the cluster has the pools' GPUs"),
    Name("verl.utils.config", "omega_conf_to_dataclass", "a model's tokenizer", "config"),
    # -- export
    Name(
        "verl.model_merger.base_model_merger",
        "ModelMergerConfig",
        "export to Hugging Face format",
        "operation backend target_dir local_dir hf_model_config_path trust_remote_code tie_word_embedding",
    ),
    Name(
        "verl.model_merger.fsdp_model_merger",
        "FSDPModelMerger",
        "export to Hugging Face format",
        "config",
        {"merge_and_save": "", "cleanup": ""},
    ),
    Name(
        "verl.model_merger.megatron_model_merger",
        "MegatronModelMerger",
        "export to Hugging Face format",
        "config",
        needs="megatron",
    ),
    # -- workers
    Name(
        "verl.workers.engine_workers",
        "ActorRolloutRefWorker",
        "temperature per row, weight updates that outlive a server",
        members={
            "init_model": "",
            "compute_log_prob": "data",
            "compute_ref_log_prob": "data",
            "load_checkpoint": "local_path del_local_after_load",
            "save_checkpoint": "local_path hdfs_path global_step max_ckpt_to_keep",
            "update_actor": "data",
        },
        attributes="actor config rollout",
    ),
    Name("verl.single_controller.base.decorator", "Dispatch.ONE_TO_ALL", "methods of the training worker"),
    Name("verl.single_controller.base.decorator", "register", "methods of the training worker", "dispatch_mode"),
    Name(
        "verl.single_controller.base.decorator",
        "make_nd_compute_dataproto_dispatch_fn",
        "methods of the training worker",
        "mesh_name",
    ),
    # -- rollout
    Name(
        f"{_V1}.agent_loop_tq",
        "AgentLoopManagerTQ",
        "the rollout manager",
        members={"generate_sequences": "prompts"},
        attributes="agent_loop_workers agent_loop_workers_class",
    ),
    Name(
        f"{_V1}.agent_loop_tq",
        "AgentLoopWorkerTQ.__ray_actor_class__",
        "the rollout worker",
        members={
            "_agent_loop_postprocess": "output validate",
            "_run_agent_loop": "sampling_params trajectory",
            "generate_sequences": "batch",
        },
        attributes="config llm_client",
    ),
    Name(
        _LOOP,
        "AgentLoopBase",
        "the session's agent loop",
        members={
            "run": "sampling_params",
            "ct_merge_assistant_token": "runtime_token_ids assistant_token_ids response_mask response_logprobs "
            "assistant_logprobs",
            "ct_merge_context_msg": "previous_messages updated_messages runtime_token_ids response_mask "
            "response_logprobs",
        },
        attributes="config continuous_token_builder loop rollout_config server_manager tokenizer",
    ),
    Name(
        _LOOP,
        "AgentLoopOutput",
        "one row per activation",
        "prompt_ids response_ids response_mask response_logprobs num_turns metrics reward_score extra_fields",
        {"as_dict": ""},
    ),
    Name(_LOOP, "DictConfigWrap", "token helpers of each model"),
    Name(_LOOP, "AgentLoopMetrics", "one row per activation"),
    Name("verl.utils.profiler", "simple_timer", "generation time of a row", "name timing_raw"),
    Name(
        "verl.workers.rollout.llm_server",
        "LLMServerClient",
        "retries on another server, answers that go on after a weight update",
        members={
            "_acquire_server": "request_id",
            "_vllm_request_id": "request_id",
            "generate": "request_id prompt_ids sampling_params",
        },
        attributes="_load_balancer",
    ),
    Name(
        "verl.workers.rollout.llm_server",
        "LLMServerManager",
        "a client of our own class; which servers are dead",
        members={"create": "", "get_client": "client_cls", "get_replicas": ""},
        attributes="global_load_balancer rollout_replica_class",
    ),
    Name(
        "verl.workers.rollout.replica",
        "get_rollout_replica_class",
        "servers of several models in one job",
        "rollout disaggregation_enabled",
    ),
    Name("verl.workers.rollout.replica", "TokenOutput", "what a server answers"),
    Name(
        "verl.workers.rollout.replica",
        "RolloutReplica",
        "watching the servers",
        members={
            "init_colocated": "resource_pool",
            "init_hybrid": "worker_group",
            "init_standalone": "",
            "server_address": "",
            "sleep": "",
            "wake_up": "",
        },
        attributes="replica_rank workers world_size",
    ),
    Name(
        "verl.checkpoint_engine",
        "CheckpointEngineManager",
        "leaving a dead server out of weight updates",
        members={
            "abort_replicas": "",
            "add_replicas": "replicas",
            "remove_replicas": "replicas",
            "resume_generation_replicas": "",
            "sleep_replicas": "",
        },
    ),
    Name(
        "verl.single_controller.ray",
        "RayWorkerGroup",
        "telling and ending the workers",
        members={"workers": ""},
        attributes="_dispatch_info",
    ),
    Name("verl.single_controller.ray", "RayResourcePool", "models of one pool", attributes="name_prefix"),
    Name(
        "verl.single_controller.ray",
        "ResourcePoolManager",
        "models of one pool",
        "resource_pool_spec mapping max_colocate_count resource_pool_dict",
        {"create_resource_pool": ""},
    ),
    Name("verl.single_controller.ray.base", "RayResourcePool", "models of one pool"),
    Name(
        "verl.single_controller.ray.base",
        "split_resource_pool",
        "servers of a frozen model",
        "resource_pool split_size",
    ),
    Name(
        "verl.workers.rollout.router",
        "GlobalRequestLoadBalancer",
        "leaving a dead server out of the balancer",
        members={"remove_servers": "server_ids"},
    ),
    # -- CPU
    Name(
        "verl.plugin.platform",
        "PlatformBase",
        "the CPU platform",
        members={"is_platform_available": "use_smi_check", "rollout_env_vars": ""},
    ),
    Name("verl.utils.distributed", "initialize_global_process_group_ray", "training over gloo on a CPU", "backend"),
    Name(
        "verl.workers.engine.fsdp.transformer_impl",
        "FSDPEngineWithLMHead",
        "the CPU engine",
        members={"_build_fsdp_module": "module"},
        attributes="engine_config",
    ),
    Name(
        f"{_VLLM}.bucketed_weight_transfer",
        "BucketedWeightReceiver",
        "weight updates of vLLM on a CPU",
        "zmq_handle device use_shm",
        {"receive_weights": "on_bucket_received"},
        needs="vllm",
    ),
    Name("verl.utils.vllm", "resolve_weight_name", "base weights beside an adapter, in vLLM on a CPU", needs="vllm"),
    Name(
        f"{_VLLM}.vllm_rollout",
        "ServerAdapter",
        "sockets of weight updates that are a job's own",
        attributes="config zmq_handle",
        needs="vllm",
    ),
    Name(
        f"{_VLLM}.utils",
        "vLLMColocateWorkerExtension",
        "weight updates of vLLM on a CPU, sockets that are a job's own",
        members={
            "_get_zmq_handle": "",
            "update_weights_from_ipc": "peft_config base_sync_done use_shm",
        },
        attributes="device model_runner",
        needs="vllm",
    ),
)


def missing(names: Sequence[Name] | None = None) -> list[str]:
    """What the installed verl lacks of the names.

    Args:
        names: Names to check; None: the whole table.

    Returns:
        One line for each name, member or parameter that isn't there; empty if all are.
    """
    return [line for name in (NAMES if names is None else names) for line in check_name(name)]
