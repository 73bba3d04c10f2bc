"""The only room that knows private names of DeepSpeed."""
