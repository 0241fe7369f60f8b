"""Opens the training process group over gloo; named by `actor_rollout_ref.model.external_lib`.

verl imports that module in a training worker after the rendezvous variables are set and before it opens the process
group itself. Its own backend string, `cpu:gloo,<device>:<backend>`, would name the cpu twice here, which torch refuses;
its start function is idempotent, so the first call wins.
"""

import os

if os.environ.get("WG_BACKEND") == "ray" and "RANK" in os.environ:
    from verl.utils.distributed import initialize_global_process_group_ray

    initialize_global_process_group_ray(backend="cpu:gloo")
