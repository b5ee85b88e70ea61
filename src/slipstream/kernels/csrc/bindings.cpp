// The extension module. Each family of kernels registers its functions from its own file.
#include <pybind11/pybind11.h>

namespace py = pybind11;

void register_linear(py::module_& m);
void register_ops(py::module_& m);
void register_experts(py::module_& m);
void register_shm(py::module_& m);

PYBIND11_MODULE(slipstream_native, m) {
    m.doc() = "slipstream's CPU kernels; the contracts are the references in slipstream/kernels/*.py";
    register_linear(m);
    register_ops(m);
    register_experts(m);
    register_shm(m);
}
