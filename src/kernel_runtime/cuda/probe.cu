// Nothing: its attributes tell how many clusters a device holds.
extern "C" __global__ void __launch_bounds__(256, 1) probe() {}
