"""verl's synchronous replay buffer that notices when nothing more will come."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class TeamReplayBuffer(ReplayBuffer):
    """`ReplayBuffer` (verl/trainer/ppo/v1/replay_buffer.py) with a stall time-out and an ear for the watchdog."""

    stall_timeout: float
    check: Callable[[], None]
    sampled: Callable[[KVBatchMeta], None]

    @classmethod
    def adopt(
        cls,
        buffer: ReplayBuffer,
        *,
        poll_interval: float,
        stall_timeout: float,
        check: Callable[[], None],
        sampled: Callable[[KVBatchMeta], None],
    ) -> TeamReplayBuffer:
        """Take over a buffer that verl built.

        verl chooses the class by the trainer mode's name and passes its settings to no other; a class attribute for the
        sampler in `PPOTrainer` would remove this.

        Args:
            buffer: Fresh from `PPOTrainer._build_replay_buffer`.
            poll_interval: Seconds between looks (verl's constructor takes it, but its trainer doesn't pass it).
            stall_timeout: Seconds without any session ending until `sample` raises.
            check: Called between looks; raises to end the run.
            sampled: Called with every batch that is handed out.
        """
        adopted = cls.__new__(cls)
        adopted.__dict__.update(buffer.__dict__)
        adopted.poll_interval, adopted.stall_timeout = poll_interval, stall_timeout
        adopted.check, adopted.sampled = check, sampled
        return adopted

    def sample(self, *args: Any, **kwargs: Any) -> tuple[KVBatchMeta, dict]:
        self._progress = (None, time.monotonic())  # the time spent training since the last call is no stall
        batch, metrics = super().sample(*args, **kwargs)
        self.sampled(batch)
        return batch, metrics

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        self.check()
        seen = (
            partition_id,
            len(self.partitions[partition_id]),
            len(self.finished_keys[partition_id]),
            len(self.failure_keys[partition_id]),
        )
        before, since = self._progress
        now = time.monotonic()
        if seen != before:
            self._progress = (seen, now)
        elif now - since > self.stall_timeout:
            running = len(self.running_keys[partition_id])
            raise TimeoutError(
                f"no session ended for {self.stall_timeout:g} s (drmas.faults.stall_timeout); "
                f"{running} prompts still run"
            )
        return super()._wait_for_next_poll(partition_id, last_debug_time)
