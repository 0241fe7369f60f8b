"""Two training jobs on one machine, started and stopped as one."""
