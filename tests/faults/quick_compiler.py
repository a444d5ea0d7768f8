"""XLA's flags for programs that run a few times: compiling well costs more than it saves.

Most of compiling is to optimize, to write each fusion in MLIR, to cut a program into 32 parts for
as many threads, and to verify it after each pass. (XLA of jax 0.12 has no other way to write a
fusion and passes over that option.)
"""

FLAGS = (
  '--xla_backend_optimization_level=0 '
  '--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters '
  '--xla_cpu_parallel_codegen_split_count=1 '
  '--xla_disable_hlo_passes=hlo-verifier'
)
