set -x
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
export PYTHONPATH=/tmp/site OMP_NUM_THREADS=1
cd .wt/a && rm -f src/quant_gru/kernels/cpu/*.so && python3 -m pip install -q --no-build-isolation --no-deps . || exit 1
mkdir -p /tmp/t && cp -r tests benchmarks pyproject.toml /tmp/t && cd /tmp/t
