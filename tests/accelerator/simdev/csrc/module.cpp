// The part of torch.sim that has to be C++.
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>
#include <thread>
#include "ops.hpp"
#include "simccl.hpp"

PYBIND11_MODULE(_C, m) {
  namespace py = pybind11;
  m.attr("DEVICES") = sim::kDevices;
  m.def("current_device", &sim::current_device);
  m.def("set_device", &sim::set_device);
  m.def("in_bad_fork", &sim::in_bad_fork);
  m.def("initialised", &sim::initialised);
  m.def("init", &sim::check_usable);
  m.def("drain", &sim::drain);
  m.def("synchronize", &sim::synchronize);
  m.def("set_patience", &sim::set_patience);
  m.def("patience", &sim::patience);
  m.def("synchronous_ops", &sim::synchronous_ops);
  m.def("default_generator", [](int device) { return py::reinterpret_steal<py::object>(THPGenerator_Wrap(sim::default_generator(device))); });
  m.def("usage", [](int device) {
    auto now = sim::usage(device);
    return std::make_tuple(now.bytes, now.peak, now.blocks);
  });
  m.def("put_sleep", [](double seconds) {  // a long kernel on the current stream
    sim::current(-1).put("sleep", [seconds] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); });
  });
  sim::bind_simccl(m);
}
