"""GPU measurements: cases x providers -> benchmarks/results/<gpu>.json -> tables and plots.

From the root of the repository: `python -m benchmarks.gpu.run`, `python -m benchmarks.gpu.render`.
"""
