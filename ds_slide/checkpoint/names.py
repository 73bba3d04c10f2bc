"""DeepSpeed's keys in its checkpoint files, by the names of `deepspeed.checkpoint.constants`."""

OPTIMIZER_STATE_DICT = "optimizer_state_dict"
PARAM = "param"
