"""What the fork server of DeepSpeed's tests imports once instead of in every rank of every test."""

import functools

import cpuinfo
import deepspeed  # noqa: F401

# DeepSpeed asks at every engine, in a process of its own that takes a second.
cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
cpuinfo.get_cpu_info()
