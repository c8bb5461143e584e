"""What the API pages promise of each class: a line for each member, with its kind, its parameters and their defaults.

Kinds: `class` (its constructor), `protocol` (a class without one), `method`, `async`, `abstract`, `classmethod`,
`staticmethod`, `property`, `field` (of a dataclass), `attribute` (of the class, with its value) and `instance` (an
attribute that the constructor sets, with its value for the fewest arguments). `...` is a value of the object's own.
"""

# ruff: noqa: E501

PAGES = {
    "recollect": """
class BatchBase(single_space, single_metadata_space=None)
abstract __len__()
method get_flattened_at(idx)
method get_flattened_at_with_metadata(idx)
method set_flattened_at(idx, value)
method append_flattened(value)
method extend_flattened(value)
method get_at(idx)
method get_at_with_metadata(idx)
method set_at(idx, value)
method remove_at(idx)
method extend_from(other, chunk_size=8, tqdm=False)
method get_slice(idx)
method get_column(nested_keys)
class BatchSampler(single_space, single_metadata_space=None, batch_size=1)
property sampled_space
property sampled_metadata_space
method get_flattened_at(idx)
method get_flattened_at_with_metadata(idx)
method set_flattened_at(idx, value)
method append_flattened(value)
method extend_flattened(value)
method get_at(idx)
method get_at_with_metadata(idx)
method set_at(idx, value)
method remove_at(idx)
method extend_from(other, chunk_size=8, tqdm=False)
method get_slice(idx)
method get_column(nested_keys)
method manual_seed(seed)
method sample_flat_with_metadata()
method sample_with_metadata()
method epoch_iter()
method epoch_iter_with_metadata()
method epoch_flat_iter()
method epoch_flat_iter_with_metadata()
class SpaceStorage(single_instance_space)
attribute single_file_ext = None
attribute capacity = None
attribute cache_filename = None
attribute is_multiprocessing_safe = False
classmethod create(single_instance_space, *args, capacity, cache_path=None, multiprocessing=False, **kwargs)
classmethod load_from(path, single_instance_space, *, capacity=None, read_only=True, multiprocessing=False, **kwargs)
method append(value)
method extend_length(length)
method shrink_length(length)
abstract get(index)
abstract set(index, value)
method clear()
abstract dumps(path)
class ToBackendOrDeviceBatch(batch, backend=None, device=None)
property backend
method append_flattened(value)
method extend_from(other, chunk_size=8, tqdm=False)
method get_slice(idx)
method get_column(nested_keys)
class CombinedBatch(batches, device=None, use_thread_pool=False)
method append_flattened(value)
method extend_from(other, chunk_size=8, tqdm=False)
method get_slice(idx)
method get_column(nested_keys)
method get_flattened_at_with_metadata(idx)
method get_at_with_metadata(idx)
method set_flattened_at(idx, value)
class SliceStackedBatch(batch, fixed_offset, get_valid_mask_function=None, fill_invalid_data=True, stack_metadata=False)
method set_flattened_at(idx, value)
method append_flattened(value)
method extend_flattened(value)
method set_at(idx, value)
method remove_at(idx)
method extend_from(other, chunk_size=8, tqdm=False)
method get_slice(idx)
method get_column(nested_keys)
method expand_index(index)
method get_valid_mask_flattened(expanded_idx, data, metadata)
method get_valid_mask(expanded_idx, data, metadata)
method fill_data_with_stack_mask(space, data, valid_mask)
method get_at_with_metadata(idx)
staticmethod get_valid_mask_function_with_episodeid_key(episode_id_key='episode_id', is_in_metadata=False)
staticmethod get_valid_mask_function_with_episode_end_key(episode_end_key='episode_end', is_in_metadata=False)
class FrameStackedBatch(batch, prefetch_horizon=0, postfetch_horizon=0, get_valid_mask_function=None, fill_invalid_data=True, stack_metadata=False)
method set_flattened_at(idx, value)
method append_flattened(value)
method extend_flattened(value)
method get_at_with_metadata(idx)
method set_at(idx, value)
method remove_at(idx)
method extend_from(other, chunk_size=8, tqdm=False)
method get_slice(idx)
method get_column(nested_keys)
method expand_index(index)
method get_valid_mask_flattened(expanded_idx, data, metadata)
method get_valid_mask(expanded_idx, data, metadata)
method fill_data_with_stack_mask(space, data, valid_mask)
staticmethod get_valid_mask_function_with_episodeid_key(episode_id_key='episode_id', is_in_metadata=False)
staticmethod get_valid_mask_function_with_episode_end_key(episode_end_key='episode_end', is_in_metadata=False)
class SubIndexedBatch(batch, sub_indexes)
method append_flattened(value)
method remove_at(idx)
method extend_from(other, chunk_size=8, tqdm=False)
method get_slice(idx)
method get_column(nested_keys)
class SubItemBatch(batch, sub_indexes)
method set_flattened_at(idx, value)
method append_flattened(value)
method extend_flattened(value)
method set_at(idx, value)
method remove_at(idx)
method extend_from(other, chunk_size=8, tqdm=False)
method get_slice(idx)
method get_column(nested_keys)
class TransformedBatch(batch, transformation, metadata_transformation=None)
instance metadata_transformation = None
method append_flattened(value)
method extend_from(other, chunk_size=8, tqdm=False)
method get_slice(idx)
method get_column(nested_keys)
method get_flattened_at_with_metadata(idx)
method set_flattened_at(idx, value)
method get_at_with_metadata(idx)
class StepSampler(data, batch_size, seed=None, device=None)
property sampled_space
property sampled_metadata_space
method set_flattened_at(idx, value)
method append_flattened(value)
method extend_flattened(value)
method set_at(idx, value)
method remove_at(idx)
method extend_from(other, chunk_size=8, tqdm=False)
method get_slice(idx)
method get_column(nested_keys)
method manual_seed(seed)
method sample_flat_with_metadata()
method sample_with_metadata()
method epoch_iter()
method epoch_iter_with_metadata()
method epoch_flat_iter()
method epoch_flat_iter_with_metadata()
class MultiprocessingSampler(sampler, n_workers=4, n_buffers=8, ctx=None, doze_time=0.005, daemon=None)
method set_flattened_at(idx, value)
method append_flattened(value)
method extend_flattened(value)
method set_at(idx, value)
method remove_at(idx)
method extend_from(other, chunk_size=8, tqdm=False)
method get_slice(idx)
method get_column(nested_keys)
method sample_flat_with_metadata()
method sample_with_metadata()
method epoch_iter()
method epoch_iter_with_metadata()
method epoch_flat_iter()
method epoch_flat_iter_with_metadata()
class ReplayBuffer(storage, storage_path_relative, count=0, offset=0, cache_path=None, multiprocessing=False, *, maintain_segment_metadata=False, physical_segments=None, active_segment_start_physical=None, active_segment_length=0)
method append_flattened(value)
method remove_at(idx)
method extend_from(other, chunk_size=8, tqdm=False)
method get_slice(idx)
staticmethod create(storage_cls, single_instance_space, *args, cache_path=None, capacity=None, multiprocessing=False, maintain_segment_metadata=False, **kwargs)
staticmethod get_length_from_path(path)
staticmethod get_capacity_from_path(path)
staticmethod get_space_from_path(path, *, backend, device=None)
staticmethod load_from(path, *, backend, device=None, read_only=True, multiprocessing=False, single_instance_space=None, **storage_kwargs)
method dumps(path)
method get_flattened_at_with_metadata(idx)
method set_flattened_at(idx, value)
class ReplayBufferCollectionWrapper(env, replay_buffers, replay_mode='auto', transition_builder=None, validate_transition=False, dump_on_episode_end=False, dump_on_reset_boundary=False, dump_path=None)
classmethod shared(env, replay_buffer, **kwargs)
classmethod per_env(env, replay_buffers, **kwargs)
method reset(*args, mask=None, seed=None, **kwargs)
method step(action)
method reset_async(*args, mask=None, seed=None, **kwargs)
method step_wait()
method set_replay_buffers(replay_buffers, *, replay_mode=None, require_same_space=True, allow_mid_episode=False, finalize_old_segments=False, dump_old=False)
""",
    "recollect.ipc": """
class SharedWeightSync(param_shapes, *, create=True, shm_name=None, lock=None)
property name
property version
classmethod from_state_dict(state_dict, **kwargs)
method write_weights(state_dict)
method read_weights_into(state_dict)
method cleanup()
method close()
class RolloutRingBuffer(num_envs, num_steps, obs_dim, action_dim, *, critic_dim=0, num_slots=4, create=True, shm_name_prefix=None)
property name
property slot_shapes
method attach_sync_primitives(write_ptr, read_ptr)
property write_slot
property write_buffer
method signal_write_done()
method available()
method wait_for_data(timeout=60.0)
property read_slot
method read_numpy_views()
method copy_read_slot_to_torch(destination)
method read_torch(device)
method advance_read()
method cleanup()
method close()
class AsyncRunner(env_name, env_cfg_overrides, rl_cfg, *, device=None, collector_device=None, sim_backend='mujoco', num_envs=4096)
abstract learn(max_iterations, save_interval=50, log_dir='logs')
method close()
class SharedObsNormStats(ctx)
method put(stats)
method get()
class ReplayBuffer(capacity, obs_dim, action_dim, device, defer_gpu=False, critic_dim=0, packed_cpu_storage=False)
method add(obs, actions, rewards, next_obs, dones, truncated, terminal_mask=None, terminal_next_obs=None, critic=None, next_critic=None, terminal_next_critic=None)
method sample(batch_size)
""",
    "recollect.ipc.replay_pipelines": """
protocol ReplayPipeline
method start_prepare(tick_id, sample_count, min_snapshot_ptr=None)
method batch_ready(tick_id, sample_count)
method wait_ready()
method wait_until_ready(tick_id, sample_count)
method sample_large_batch(tick_id, sample_count)
method after_tick()
method close()
class ReplayTickMetadata(tick_id, snapshot_ptr, snapshot_size, sample_seed, sample_count, batch_host_slot=None, batch_gpu_slot=None)
field tick_id
field snapshot_ptr
field snapshot_size
field sample_seed
field sample_count
field batch_host_slot
field batch_gpu_slot
class CPUPinnedDoubleBufferReplayPipeline(replay_buffer, *, device, sample_count, base_seed=0, trace_recorder=None, trace_cuda_events=True, verbose=False, verbose_output_dir=None, collector_pack_request_queue=None, collector_pack_ready_queue=None, collector_pack_shared_slots=None)
property h2d_submitter
property transfer_manifest
method start_prepare(tick_id, sample_count, min_snapshot_ptr=None)
method batch_ready(tick_id, sample_count)
method wait_ready()
method wait_until_ready(tick_id, sample_count)
method sample_large_batch(tick_id, sample_count)
method after_tick()
method close()
""",
    "recollect.remote": """
class ReplayBufferManager(env, rank, num_training_ranks, scoring_function=None, diverse_replay_buffer=False, capacity=10000, remote_manager_rank=None, communication_backend='mpi', timing=False, store_locally=True, baseline_strategy='min', baseline_percentile=0.1, baseline_ema_alpha=0.1)
method default_scoring_function(obj, sender_rank=-1)
staticmethod get_metadata(manager_rank, backend)
method run(async_send=True)
staticmethod send_termination_signal(manager_rank, backend)
method _compute_metadata()
method _handle_message_async(sender_rank, msg, msg_data_len=0)
method _handle_message_sync(sender_rank, msg, msg_data_len=0)
method _inject_baseline_log_reward(score_dict, incoming)
method _print_timing_summary()
method _prune_completed_sends()
method _recv_object()
instance _baseline_ema = None
instance _comm_stats = {}
instance _pending_sends = []
instance _timing_data = {}
instance baseline_ema_alpha = 0.1
instance baseline_percentile = 0.1
instance baseline_strategy = 'min'
instance capacity = 10000
instance communication_backend = ...
instance diverse_replay_buffer = False
instance exit_counter = 0
instance is_running = True
instance num_training_ranks = 1
instance rank = 0
instance remote_manager_rank = None
instance scoring_function = ...
instance store_locally = True
instance timing = False
""",
    "recollect.rollout": """
class BatchState(batch_id, batch_type, expected_task_count, statuses=..., min_wait_num=None, state=BatchLifecycleState.PENDING, final_result=None, finalize_lock=...)
field batch_id
field batch_type
field expected_task_count
field statuses
field min_wait_num
field state
field final_result
field finalize_lock
property completed_task_count
class RolloutCoordinator(config, rollout_model, auxiliary_models=None)
async prepare()
async shutdown()
async submit_batch(*, batch_id, tasks, batch_type, min_wait_num=None)
async finalize_train_batch(batch_id, *, timeout=None)
async finalize_eval_batch(batch_id, *, timeout=None)
async abort_batch(batch_id, *, reason, keep_partial_results=False)
async process_experiences(payloads)
classmethod get_actor(config, models, auxiliary_models)
""",
}

CONSTANTS = {
    "recollect.remote.DATA_TAG": 0,
    "recollect.remote.METADATA_TAG": 1,
    "recollect.rollout.BatchLifecycleState.PENDING": "pending",
    "recollect.rollout.BatchLifecycleState.RUNNING": "running",
    "recollect.rollout.BatchLifecycleState.FINALIZING": "finalizing",
    "recollect.rollout.BatchLifecycleState.FINALIZED": "finalized",
    "recollect.rollout.BatchLifecycleState.ABORTED": "aborted",
}
