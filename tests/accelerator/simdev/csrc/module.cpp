// The part of torch.sim that has to be C++.
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>

#include <thread>

#include "ops.hpp"
#include "simccl.hpp"
#include "wire.hpp"

namespace {

using Seconds = std::chrono::duration<double>;

// At exit: let streams finish, but do not wait for ranks that will never come.
void finish() {
  const pybind11::gil_scoped_release without_gil;
  if (sim::drain(sim::Clock::now() + std::chrono::seconds(2))) return;
  sim::Wire::abort_all();
  sim::drain(sim::Clock::now() + std::chrono::seconds(2));
}

// A long kernel on the current stream.
void put_sleep(double seconds) {
  sim::current_queue(-1).put("sleep", [seconds] {
    std::this_thread::sleep_for(Seconds(seconds));
  });
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  namespace py = pybind11;
  m.def("device_count", &sim::device_count);
  m.def("current_device", &sim::current_device);
  m.def("set_device", &sim::set_device);
  m.def("initialise", &sim::initialise);
  m.def("is_initialised", &sim::is_initialised);
  m.def("is_in_bad_fork", &sim::is_in_bad_fork);
  m.def("finish", &finish);
  m.def("set_patience", &sim::set_patience);
  m.def("patience", &sim::patience);
  m.def("put_sleep", &put_sleep);
  m.def("default_generator", [](int device) {
    return py::reinterpret_steal<py::object>(THPGenerator_Wrap(sim::default_generator(device)));
  });
  m.def("counters", [] {
    const auto now = sim::counters();
    return std::make_pair(now.syncs, now.bytes);
  });
  sim::bind_simccl(m);
}
