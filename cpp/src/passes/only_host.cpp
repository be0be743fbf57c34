// A library without CUDA: all memory is memory of the host.
#include "passes/on_device.hpp"

namespace quant_gru {

template <class T>
struct OnDevice<T>::State {};

template <class T>
OnDevice<T>::OnDevice(cublasHandle_t, cudaStream_t) {}

template <class T>
OnDevice<T>::~OnDevice() = default;

template <class T>
void OnDevice<T>::forward(int, const PassSizes &, Zoneout, const ForwardArguments<T> &) {}

template <class T>
void OnDevice<T>::backward(int, const PassSizes &, const BackwardArguments<T> &) {}

template <class T>
int device_of(const ForwardArguments<T> &) {
    return kHost;
}

template <class T>
int device_of(const BackwardArguments<T> &) {
    return kHost;
}

template int device_of(const ForwardArguments<float> &);
template int device_of(const ForwardArguments<double> &);
template int device_of(const BackwardArguments<float> &);
template int device_of(const BackwardArguments<double> &);
template class OnDevice<float>;
template class OnDevice<double>;

}  // namespace quant_gru
