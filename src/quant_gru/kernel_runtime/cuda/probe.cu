// An empty kernel, with which the number of clusters that fit a device is queried.
extern "C" __global__ void __launch_bounds__(256, 1) probe() {}
