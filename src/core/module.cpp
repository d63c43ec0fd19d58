// The Python module unisono._core, for the stable ABI of Python 3.11 and later.
//
// Tensors arrive as addresses and lengths, dtypes and reductions as numbers. All waits happen without
// the interpreter's lock. During a long wait `look(verb, missing, waited_s, timeout_s)` is called,
// which may raise; `report(status, verb, error, headers, table)` returns the exception for whatever
// went wrong, in the thread that ran it.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>

#include "lstm.hpp"
#include "started.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

using namespace unisono;

namespace {

// -- small conversions ----------------------------------------------------------------------------

using Args = PyObject* const*;

bool has(Py_ssize_t given, Py_ssize_t wanted, const char* name) {
  if (given == wanted) return true;
  PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, wanted, given);
  return false;
}
uint8_t* address(PyObject* x) { return static_cast<uint8_t*>(PyLong_AsVoidPtr(x)); }
size_t bytes(PyObject* x) { return PyLong_AsSize_t(x); }
int number(PyObject* x) {  // one that is too large stays too large
  return static_cast<int>(std::clamp<long>(PyLong_AsLong(x), INT_MIN, INT_MAX));
}

// Whether nothing was raised and `fits`; else a ValueError is raised, unless something was.
bool expect(bool fits, const char* what) {
  if (!PyErr_Occurred() && !fits) PyErr_SetString(PyExc_ValueError, what);
  return !PyErr_Occurred();
}
// A tensor may have no address if it has no elements.
bool expect_memory(const void* at, size_t nbytes) { return expect(at || !nbytes, "a tensor without memory"); }

// A list of (address, bytes), one for each rank; None where this rank has none.
Blocks blocks(PyObject* list, int size) {
  Blocks found;
  if (list == Py_None) return found;
  const Py_ssize_t n = PyList_Size(list);
  if (!expect(n == size, "one block for each rank of the group")) return found;
  for (Py_ssize_t i = 0; i < n; i++) {
    PyObject* pair = PyList_GetItem(list, i);
    PyObject *at = PyTuple_GetItem(pair, 0), *nbytes = PyTuple_GetItem(pair, 1);
    if (!at || !nbytes) return found;
    found.at.push_back(address(at));
    found.nbytes.push_back(bytes(nbytes));
    if (!expect_memory(found.at.back(), found.nbytes.back())) return found;
  }
  return found;
}

struct Unlocked {
  PyThreadState* state = PyEval_SaveThread();
  ~Unlocked() { PyEval_RestoreThread(state); }
};
// Keeps an object alive, which may be null.
struct Reference {
  PyObject* object;
  explicit Reference(PyObject* object) : object(object) { Py_XINCREF(object); }
  ~Reference() { Py_XDECREF(object); }
};
struct Locked {
  PyGILState_STATE state = PyGILState_Ensure();
  ~Locked() { PyGILState_Release(state); }
};

PyObject* caught() {  // the exception that was raised, as an owned object
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (trace) PyException_SetTraceback(value, trace);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  return value;
}
// Turns an exception of C++ into one of Python; called in a handler, with the interpreter's lock.
void translate() {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "the core failed");
  }
}
// An entry of the module that no exception of C++ leaves.
template <auto function, class... Arguments>
PyObject* guarded(Arguments... arguments) {
  try {
    return function(arguments...);
  } catch (...) {
    translate();
    return nullptr;
  }
}

// Ends the deallocation of an object of a heap type.
void free_object(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

PyObject* raise(PyObject* error) {  // steals
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
  Py_DECREF(error);
  return nullptr;
}

// -- Memory: a mapped file, as long as anything refers to it --------------------------------------

struct Memory {
  PyObject_HEAD
  void* at;
  size_t nbytes;
  PyObject* weak;
};

int memory_buffer(PyObject* self, Py_buffer* view, int flags) {
  auto* m = reinterpret_cast<Memory*>(self);
  return PyBuffer_FillInfo(view, self, m->at, static_cast<Py_ssize_t>(m->nbytes), 0, flags);
}
void memory_free(PyObject* self) {
  auto* m = reinterpret_cast<Memory*>(self);
  if (m->weak) PyObject_ClearWeakRefs(self);
  if (m->at) munmap(m->at, m->nbytes);
  free_object(self);
}
PyObject* memory_address(PyObject* self, void*) {
  return PyLong_FromVoidPtr(reinterpret_cast<Memory*>(self)->at);
}
PyGetSetDef memory_getters[] = {{"address", memory_address, nullptr, "Where it begins in this process.", nullptr},
                                {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyMemberDef memory_members[] = {{"__weaklistoffset__", T_PYSSIZET, offsetof(Memory, weak), READONLY, nullptr},
                                {nullptr, 0, 0, 0, nullptr}};
PyType_Slot memory_slots[] = {{Py_tp_members, memory_members},
                              {Py_tp_dealloc, reinterpret_cast<void*>(memory_free)},
                              {Py_tp_getset, memory_getters},
                              {Py_bf_getbuffer, reinterpret_cast<void*>(memory_buffer)},
                              {0, nullptr}};
PyType_Spec memory_spec = {"unisono._core.Memory", sizeof(Memory), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, memory_slots};
PyTypeObject* memory_type;

PyObject* map_memory(PyObject*, Args args, Py_ssize_t n) {
  if (!has(n, 2, "map")) return nullptr;
  const int fd = number(args[0]);
  const size_t size = bytes(args[1]);
  if (PyErr_Occurred()) return nullptr;
  void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return PyErr_SetFromErrno(PyExc_OSError);
  auto* m = reinterpret_cast<Memory*>(PyType_GenericAlloc(memory_type, 0));
  if (!m) {
    munmap(at, size);
    return nullptr;
  }
  m->at = at;
  m->nbytes = size;
  return reinterpret_cast<PyObject*>(m);
}

// Gives every page of the range memory now, near the core that asks; a full host is an error here
// and not a SIGBUS later.
PyObject* populate(PyObject*, Args args, Py_ssize_t n) {
  if (!has(n, 2, "populate")) return nullptr;
  const auto begin = reinterpret_cast<uintptr_t>(address(args[0]));
  const size_t nbytes = bytes(args[1]);
  if (PyErr_Occurred()) return nullptr;
  const uintptr_t page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t page = begin / page_bytes * page_bytes;
  int failed;
  {
    Unlocked unlocked;
    failed = madvise(reinterpret_cast<void*>(page), nbytes + (begin - page), MADV_POPULATE_WRITE) ? errno : 0;
  }
  if (failed && failed != EINVAL) {  // EINVAL: a kernel before 5.14
    errno = failed;
    return PyErr_SetFromErrno(PyExc_OSError);
  }
  Py_RETURN_NONE;
}

// -- Group ----------------------------------------------------------------------------------------

struct PyGroup {
  PyObject_HEAD
  Group* group;
  Order* order;
  PyObject *memory, *look, *report;
  pid_t pid;
  bool is_released;
};

PyGroup* of(PyObject* self) { return reinterpret_cast<PyGroup*>(self); }
PyGroup* held(PyGroup* self) {
  Py_INCREF(reinterpret_cast<PyObject*>(self));
  return self;
}

// Whether `x` is a rank of the group, or one that stands for none or any, from `least` on.
bool expect_rank(const Group& group, long rank, int least = 0) {
  if (!PyErr_Occurred() && (rank < least || rank >= group.size))
    PyErr_Format(PyExc_ValueError, "rank %ld in a group of %d", rank, group.size);
  return !PyErr_Occurred();
}

thread_local PyObject* looked = nullptr;  // what `look` has raised in this thread
// What a signal handler has raised in this thread while it ran a call of others: it ends that call, and
// the thread's own wait, too.
thread_local PyObject* interrupted = nullptr;

// One call under way: what it does, and the error it has ended with.
struct Call {
  StartedRef started;
  PyObject* error = nullptr;  // owned
  ~Call() {
    if (!error) return;
    Locked locked;
    Py_DECREF(error);
  }
};

PyObject* list_of(const std::vector<int>& ranks) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(ranks.size()));
  for (size_t i = 0; i < ranks.size(); i++) PyList_SetItem(list, static_cast<Py_ssize_t>(i), PyLong_FromLong(ranks[i]));
  return list;
}

// What a signal handler has raised in the thread that waits for a call: another thread may run it.
struct Signalled {
  std::atomic<PyObject*> error{nullptr};  // owned
  PyObject* take() { return error.exchange(nullptr); }
  // Whether one has; runs handlers if this is the main thread.
  bool check() {
    Locked locked;
    if (!error.load() && PyErr_CheckSignals()) error = caught();
    return error.load() != nullptr;
  }
};

Look look_of(PyObject* look, int verb, double timeout_s, Signalled* signalled = nullptr) {
  return [=](const std::vector<int>& missing, double waited_s) {
    Locked locked;
    if (signalled && (looked = signalled->take())) return false;
    if (PyErr_CheckSignals()) {
      looked = caught();
      if (!interrupted) interrupted = Py_NewRef(looked);
      return false;
    }
    PyObject* answer = PyObject_CallFunction(look, "iNdd", verb, list_of(missing), waited_s, timeout_s);
    if (!answer) looked = caught();
    Py_XDECREF(answer);
    return answer != nullptr;
  };
}

// Returns the exception for a call that went wrong; called without the interpreter's lock. Only a collective
// has headers to tell of; another thread may be in one while this one waits for a message.
PyObject* report(PyGroup* self, Status status, int verb, bool has_headers) {
  Locked locked;
  PyObject* rows = PyList_New(0);
  for (const Header& h : has_headers ? self->group->headers() : std::vector<Header>()) {
    PyObject* row = Py_BuildValue("(KKK)", (unsigned long long)h.code, (unsigned long long)h.nbytes, (unsigned long long)h.digest);
    PyList_Append(rows, row);
    Py_DECREF(row);
  }
  PyObject* table = PyList_New(0);
  for (uint64_t n : has_headers ? self->group->table() : std::vector<uint64_t>()) {
    PyObject* value = PyLong_FromUnsignedLongLong(n);
    PyList_Append(table, value);
    Py_DECREF(value);
  }
  PyObject* error = std::exchange(looked, nullptr);
  if (!error) error = Py_NewRef(Py_None);
  PyObject* raised = PyObject_CallFunction(self->report, "iiNNN", (int)status, verb, error, rows, table);
  return raised ? raised : caught();
}

// The same where no exception of C++ may pass: in the group's thread.
PyObject* reported(PyGroup* self, Status status, int verb, bool has_headers) noexcept {
  try {
    return report(self, status, verb, has_headers);
  } catch (...) {
    Locked locked;
    translate();
    return caught();
  }
}

// Runs a kernel in the group's order. `tensors` is None for a blocking call, which returns None; else
// the call is started and handed out, and keeps them alive.
PyObject* started_object(PyGroup* self, std::shared_ptr<Call> call, PyObject* tensors);

template <class Kernel>
PyObject* run(PyGroup* self, PyObject* tensors, int verb, double timeout_s, Kernel kernel) {
  if (PyErr_Occurred()) return nullptr;
  if (self->is_released) {
    PyErr_SetString(PyExc_RuntimeError, "the group was closed");
    return nullptr;
  }
  const Reference memory(self->memory);  // another thread may close the group meanwhile
  auto body = [self, verb, timeout_s, kernel](PyObject** error, Signalled* signalled) {
    Group& g = *self->group;
    Status status = kAborted;
    if (signalled && interrupted) return;
    try {
      g.patience.look_s = std::min(0.05, timeout_s);
      g.look = look_of(self->look, verb, timeout_s, signalled);
      status = kernel(g);
    } catch (...) {  // reported to the other ranks, as any failure is
      Locked locked;
      translate();
      looked = caught();
    }
    g.look = nullptr;
    if (status != kOk) *error = reported(self, status, verb, true);
  };
  if (tensors == Py_None) {
    PyObject* error = nullptr;
    Signalled signalled;
    {
      Unlocked unlocked;
      self->order->perform([&] { body(&error, &signalled); }, [&] { return signalled.check(); });
    }
    for (PyObject* signal : {signalled.take(), std::exchange(interrupted, nullptr)}) {
      if (!error) error = std::exchange(signal, nullptr);
      Py_XDECREF(signal);
    }
    if (error) return raise(error);
    Py_RETURN_NONE;
  }
  auto call = std::make_shared<Call>();
  PyObject* object = started_object(self, call, tensors);  // keeps the tensors alive before the call starts
  if (!object) return nullptr;
  try {
    Unlocked unlocked;
    call->started = self->order->start([body, call] { body(&call->error, nullptr); });
  } catch (...) {
    Py_DECREF(object);
    throw;
  }
  return object;
}

// -- started calls --------------------------------------------------------------------------------

struct PyStarted {
  PyObject_HEAD
  PyGroup* group;
  std::shared_ptr<Call>* call;
  PyObject* tensors;
};
PyTypeObject* started_type;

PyObject* started_object(PyGroup* self, std::shared_ptr<Call> call, PyObject* tensors) {
  auto* object = reinterpret_cast<PyStarted*>(PyType_GenericAlloc(started_type, 0));
  if (!object) return nullptr;
  object->group = held(self);
  object->call = new std::shared_ptr<Call>(std::move(call));
  object->tensors = Py_NewRef(tensors);
  return reinterpret_cast<PyObject*>(object);
}

void started_free(PyObject* self) {
  auto* s = reinterpret_cast<PyStarted*>(self);
  delete s->call;
  Py_XDECREF(s->tensors);
  Py_XDECREF(reinterpret_cast<PyObject*>(s->group));
  free_object(self);
}

PyObject* started_done(PyObject* self, PyObject*) {
  return PyBool_FromLong((*reinterpret_cast<PyStarted*>(self)->call)->started->done.load());
}

PyObject* started_error(PyObject* self, void*) {
  auto& call = **reinterpret_cast<PyStarted*>(self)->call;
  PyObject* error = call.started->done.load() && call.error ? call.error : Py_None;
  return Py_NewRef(error);
}

// Lends a hand until the call has ended or the time is over: 1, 0, or -1 after a signal that raised.
int await(PyStarted* s, double timeout_s) {
  auto call = *s->call;
  const int64_t end = now_ns() + static_cast<int64_t>(std::min(timeout_s, 1e9) * 1e9);
  bool done = call->started->done.load();
  while (!done) {
    const double left = (end - now_ns()) * 1e-9;
    if (left <= 0) break;
    {
      Unlocked unlocked;
      done = s->group->order->wait(call->started, std::min(left, 0.05));
    }
    if (PyObject* signal = std::exchange(interrupted, nullptr)) {
      raise(signal);
      return -1;
    }
    if (!done && PyErr_CheckSignals()) return -1;
  }
  return done;
}

PyObject* started_wait(PyObject* self, PyObject* seconds) {
  auto* s = reinterpret_cast<PyStarted*>(self);
  const double timeout_s = PyFloat_AsDouble(seconds);
  if (PyErr_Occurred()) return nullptr;
  const int done = await(s, timeout_s);
  if (done < 0) return nullptr;
  if (!done) {
    char text[96];
    std::snprintf(text, sizeof text, "a call of a shm group did not end within %g s", timeout_s);
    PyErr_SetString(PyExc_TimeoutError, text);
    return nullptr;
  }
  if (PyObject* error = (*s->call)->error) return raise(Py_NewRef(error));
  Py_RETURN_NONE;
}

// Whether the call has ended, well or badly, within the time.
PyObject* started_ended(PyObject* self, PyObject* seconds) {
  const double timeout_s = PyFloat_AsDouble(seconds);
  if (PyErr_Occurred()) return nullptr;
  const int done = await(reinterpret_cast<PyStarted*>(self), timeout_s);
  return done < 0 ? nullptr : PyBool_FromLong(done);
}

// Calls `callback()` at once if the call has ended; else when it and those issued before now have, in
// the thread that ran the last.
PyObject* started_then(PyObject* self, PyObject* callback) {
  auto* s = reinterpret_cast<PyStarted*>(self);
  Py_INCREF(callback);
  const auto ring_back = [callback] {
    Locked locked;
    PyObject* answer = PyObject_CallNoArgs(callback);
    if (!answer) PyErr_WriteUnraisable(callback);
    Py_XDECREF(answer);
    Py_DECREF(callback);
  };
  if (!s->group->order->then(*(*s->call)->started, ring_back)) ring_back();
  Py_RETURN_NONE;
}

PyMethodDef started_methods[] = {
    {"done", guarded<started_done>, METH_NOARGS, "Whether the call has ended."},
    {"wait", guarded<started_wait>, METH_O, "wait(seconds): raises what the call has raised, or TimeoutError."},
    {"ended", guarded<started_ended>, METH_O, "ended(seconds): wait; whether the call has ended."},
    {"then", guarded<started_then>, METH_O, "Call a function now if the call has ended, else when all issued so far have."},
    {nullptr, nullptr, 0, nullptr}};
PyGetSetDef started_getters[] = {{"error", started_error, nullptr, "What the call has raised, None if nothing.", nullptr},
                                 {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot started_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(started_free)},
                               {Py_tp_methods, started_methods},
                               {Py_tp_getset, started_getters},
                               {0, nullptr}};
PyType_Spec started_spec = {"unisono._core.Started", sizeof(PyStarted), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, started_slots};

// -- messages -------------------------------------------------------------------------------------

struct PyTransfers {
  PyObject_HEAD
  PyGroup* group;
  std::vector<TransferRef>* transfers;
  PyObject *sends, *recvs;  // lists of (rank, tensor), kept alive
};
PyTypeObject* transfers_type;
constexpr int kMessage = 255;  // as a verb, for `look` and `report`
constexpr int kRefused = 4;    // as a status, for `report`

void transfers_free(PyObject* self) {
  auto* t = reinterpret_cast<PyTransfers*>(self);
  delete t->transfers;
  Py_XDECREF(t->sends);
  Py_XDECREF(t->recvs);
  Py_XDECREF(reinterpret_cast<PyObject*>(t->group));
  free_object(self);
}

PyObject* transfers_done(PyObject* self, PyObject*) {
  auto* t = reinterpret_cast<PyTransfers*>(self);
  if (!t->group->is_released) t->group->group->messages.progress();
  for (const auto& transfer : *t->transfers)
    if (!transfer->done) Py_RETURN_FALSE;
  Py_RETURN_TRUE;
}

// The exception for a message of another length or dtype than expected; null for a right one. Receives come first.
PyObject* refusal(PyTransfers* t, size_t i) {
  const Transfer& x = *(*t->transfers)[i];
  if (!x.refused) return nullptr;
  PyObject* row = Py_BuildValue("[(iKL)]", x.peer.load(), (unsigned long long)x.found_nbytes, (long long)x.found_dtype);
  PyObject* raised = PyObject_CallFunction(t->group->report, "iiON[L]", kRefused, kMessage,
                                         PyList_GetItem(t->recvs, static_cast<Py_ssize_t>(i)), row, (long long)x.tag);
  return raised ? raised : caught();
}

PyObject* transfers_wait(PyObject* self, PyObject* seconds) {
  auto* t = reinterpret_cast<PyTransfers*>(self);
  const double timeout_s = PyFloat_AsDouble(seconds);
  if (PyErr_Occurred()) return nullptr;
  PyObject* error = nullptr;
  const Reference memory(t->group->memory);
  if (!t->group->is_released) {
    Unlocked unlocked;
    Messages& messages = t->group->group->messages;
    messages.progress();
    const Status status = messages.wait(*t->transfers, look_of(t->group->look, kMessage, timeout_s), std::min(0.05, timeout_s));
    if (status != kOk) error = reported(t->group, status, kMessage, false);
    // The group's thread rested while this one moved messages on.
    else if (messages.unattended() && messages.overflows()) t->group->order->attend_messages();
  }
  for (size_t i = 0; !error && i < t->transfers->size(); i++) error = refusal(t, i);
  if (error) return raise(error);
  Py_RETURN_NONE;
}

PyObject* transfers_source(PyObject* self, void*) {
  return PyLong_FromLong(reinterpret_cast<PyTransfers*>(self)->transfers->front()->peer.load());
}

PyMethodDef transfers_methods[] = {
    {"done", guarded<transfers_done>, METH_NOARGS, "Whether all messages have gone or come."},
    {"wait", guarded<transfers_wait>, METH_O, "wait(seconds): wait for all messages."},
    {nullptr, nullptr, 0, nullptr}};
PyGetSetDef transfers_getters[] = {{"source", transfers_source, nullptr, "Rank at the other end of the first message.", nullptr},
                                   {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot transfers_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(transfers_free)},
                                 {Py_tp_methods, transfers_methods},
                                 {Py_tp_getset, transfers_getters},
                                 {0, nullptr}};
PyType_Spec transfers_spec = {"unisono._core.Transfers", sizeof(PyTransfers), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, transfers_slots};

// A row (rank, tensor, address, bytes, dtype) of a message. Of a tensor that is not contiguous, bytes
// are those of an element, and its shape and strides follow.
struct Row {
  int peer, dtype;
  Extent extent;
  explicit Row(PyObject* row)
      : peer(number(PyTuple_GetItem(row, 0))), dtype(number(PyTuple_GetItem(row, 4))),
        extent(address(PyTuple_GetItem(row, 2)), bytes(PyTuple_GetItem(row, 3))) {
    if (!expect_memory(extent.at, extent.nbytes) || PyTuple_Size(row) < 7) return;
    PyObject *shape = PyTuple_GetItem(row, 5), *strides = PyTuple_GetItem(row, 6);
    const size_t each = extent.nbytes;
    const Py_ssize_t dims = PyTuple_Size(shape);
    if (dims > Extent::kMostDims) PyErr_SetString(PyExc_ValueError, "a message of too many dims");
    for (Py_ssize_t d = dims - 1; d >= 0 && !PyErr_Occurred(); d--)
      extent.add_outer_dim(bytes(PyTuple_GetItem(shape, d)), bytes(PyTuple_GetItem(strides, d)) * each);
  }
};

// post(sends, recvs, tag, waits): lists of such rows. Rank -1 receives from any rank.
// `waits`: the caller is about to wait, so nothing is left to the group's thread.
PyObject* group_post(PyObject* object, Args args, Py_ssize_t n) {
  auto* self = reinterpret_cast<PyGroup*>(object);
  if (!has(n, 4, "post")) return nullptr;
  if (self->is_released) {
    PyErr_SetString(PyExc_RuntimeError, "the group was closed");
    return nullptr;
  }
  Messages& messages = self->group->messages;
  const long long tag = PyLong_AsLongLong(args[2]);
  std::vector<Row> rows;
  for (int is_send = 0; is_send < 2; is_send++) {
    PyObject* list = args[1 - is_send];  // receives first: what comes finds its place
    for (Py_ssize_t i = 0; i < PyList_Size(list) && !PyErr_Occurred(); i++) {
      rows.emplace_back(PyList_GetItem(list, i));
      const long peer = PyLong_AsLong(PyTuple_GetItem(PyList_GetItem(list, i), 0));
      if (expect_rank(*self->group, peer, is_send ? 0 : -1) && peer == self->group->rank) PyErr_Format(PyExc_ValueError, "a message of rank %ld to itself", peer);
    }
  }
  if (PyErr_Occurred()) return nullptr;  // before any is posted
  auto transfers = std::make_unique<std::vector<TransferRef>>();
  const size_t receives = static_cast<size_t>(PyList_Size(args[1]));
  for (const Row& row : rows)
    transfers->push_back(transfers->size() < receives ? messages.post_recv(row.peer, tag, row.extent, row.dtype)
                                                      : messages.post_send(row.peer, tag, row.extent, row.dtype));
  auto* result = reinterpret_cast<PyTransfers*>(PyType_GenericAlloc(transfers_type, 0));
  if (!result) return nullptr;
  result->group = held(self);
  result->transfers = transfers.release();
  result->sends = Py_NewRef(args[0]);
  result->recvs = Py_NewRef(args[1]);
  if (!PyObject_IsTrue(args[3])) {
    Unlocked unlocked;
    messages.progress();
    if (messages.overflows()) self->order->attend_messages();
  }
  return reinterpret_cast<PyObject*>(result);
}

// -- the group's methods --------------------------------------------------------------------------

double seconds(PyObject* x) { return PyFloat_AsDouble(x); }

// Reads the arguments of a collective behind `tensors, timeout_s`, each by the type that the method
// of the group takes, and runs it if `check` finds nothing wrong with them.
template <class T>
T argument(Group& group, PyObject* x) {
  if constexpr (std::is_same_v<T, Blocks>) return blocks(x, group.size);
  else if constexpr (std::is_pointer_v<T>) return address(x);
  else if constexpr (std::is_same_v<T, int64_t>) return static_cast<int64_t>(PyLong_AsUnsignedLongLongMask(x));
  else if constexpr (std::is_same_v<T, size_t>) return bytes(x);
  else return number(x);
}
template <class... T, size_t... i>
std::tuple<T...> arguments(Group& group, Args a, std::index_sequence<i...>) {
  return {argument<T>(group, a[i])...};
}
template <class... Parameters, class Check>
PyObject* collective(PyObject* self, Args a, Py_ssize_t n, const char* name, Verb verb, Status (Group::*method)(Parameters...), Check check) {
  if (!has(n, 2 + sizeof...(Parameters), name)) return nullptr;
  Group& group = *of(self)->group;
  const auto values = arguments<std::decay_t<Parameters>...>(group, a + 2, std::index_sequence_for<Parameters...>());
  if (PyErr_Occurred() || !std::apply([&](const auto&... each) { return check(group, each...); }, values)) return nullptr;
  return run(of(self), a[0], verb, seconds(a[1]), [=](Group& g) {
    return std::apply([&](const auto&... each) { return (g.*method)(each...); }, values);
  });
}

bool expect_reduction(int dtype, int op) {
  if (!reduction(dtype, op)) PyErr_Format(PyExc_ValueError, "no reduction %d of dtype %d", op, dtype);
  return !PyErr_Occurred();
}
bool expect_blocks(const Blocks& all) { return expect(!all.at.empty(), "one block for each rank of the group"); }

PyObject* group_barrier(PyObject* self, Args a, Py_ssize_t n) {
  return collective(self, a, n, "barrier", kBarrier, &Group::barrier, [](Group&) { return true; });
}
PyObject* group_all_reduce(PyObject* self, Args a, Py_ssize_t n) {
  const Verb verb = n == 7 && number(a[6]) >= 0 ? kReduce : kAllReduce;
  return collective(self, a, n, "all_reduce", verb, &Group::all_reduce, [](Group& group, auto x, auto elements, int dtype, int op, int root) {
    return expect_reduction(dtype, op) && expect_memory(x, elements) && expect_rank(group, root, -1) &&
           expect(elements <= SIZE_MAX / 64, "more elements than fit into memory");
  });
}
PyObject* group_reduce_scatter(PyObject* self, Args a, Py_ssize_t n) {
  return collective(self, a, n, "reduce_scatter", kReduceScatter, &Group::reduce_scatter, [](Group& group, auto out, auto& ins, int dtype, int op, int64_t) {
    return expect_blocks(ins) && expect_memory(out, ins.nbytes[group.rank]) && expect_reduction(dtype, op);
  });
}
PyObject* group_broadcast(PyObject* self, Args a, Py_ssize_t n) {
  return collective(self, a, n, "broadcast", kBroadcast, &Group::broadcast, [](Group& group, auto x, auto nbytes, int, int root) {
    return expect_memory(x, nbytes) && expect_rank(group, root);
  });
}
PyObject* group_all_gather(PyObject* self, Args a, Py_ssize_t n) {
  return collective(self, a, n, "all_gather", kAllGather, &Group::all_gather, [](Group& group, auto& outs, auto x, int, int64_t) {
    return expect_blocks(outs) && expect_memory(x, outs.nbytes[group.rank]);
  });
}
PyObject* group_gather(PyObject* self, Args a, Py_ssize_t n) {
  return collective(self, a, n, "gather", kGather, &Group::gather, [](Group& group, auto& outs, auto x, auto nbytes, int, int root) {
    return expect_memory(x, nbytes) && expect_rank(group, root) &&
           expect(root != group.rank || !outs.at.empty(), "blocks to gather into on the root");
  });
}
PyObject* group_all_to_all(PyObject* self, Args a, Py_ssize_t n) {
  return collective(self, a, n, "all_to_all", kAllToAll, &Group::all_to_all,
                    [](Group&, auto& outs, auto& ins, int) { return expect_blocks(outs) && expect_blocks(ins); });
}
PyObject* group_scatter(PyObject* self, Args a, Py_ssize_t n) {
  return collective(self, a, n, "scatter", kScatter, &Group::scatter, [](Group& group, auto out, auto nbytes, auto& ins, int, int root) {
    return expect_memory(out, nbytes) && expect_rank(group, root) &&
           expect(root != group.rank || !ins.at.empty(), "blocks to scatter on the root");
  });
}
PyObject* group_agree(PyObject* self, Args a, Py_ssize_t n) {
  if (!has(n, 4, "agree")) return nullptr;
  const int dtype = number(a[1]);
  const uint64_t nbytes = bytes(a[2]), digest = PyLong_AsUnsignedLongLongMask(a[3]);
  return run(of(self), Py_None, kSharedBuffer, seconds(a[0]),
             [=](Group& g) { return g.agree(kSharedBuffer, dtype, nbytes, digest); });
}

// A tuple of integers from each rank; all of one length.
PyObject* group_ints(PyObject* self, Args a, Py_ssize_t n) {
  if (!has(n, 2, "ints")) return nullptr;
  PyGroup* g = of(self);
  const int size = g->group->size;
  const Py_ssize_t count = PySequence_Size(a[1]);
  std::vector<int64_t> own, all;
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject* item = PySequence_GetItem(a[1], i);
    if (!item) return nullptr;
    own.push_back(PyLong_AsLongLong(item));
    Py_DECREF(item);
  }
  all.resize(static_cast<size_t>(size) * own.size());
  Blocks outs;
  for (int r = 0; r < size; r++) {
    outs.at.push_back(reinterpret_cast<uint8_t*>(all.data() + r * own.size()));
    outs.nbytes.push_back(own.size() * sizeof(int64_t));
  }
  const auto* x = reinterpret_cast<const uint8_t*>(own.data());
  PyObject* ended = run(g, Py_None, kInts, seconds(a[0]), [&](Group& group) { return group.ints(outs, x); });
  if (!ended) return nullptr;
  Py_DECREF(ended);
  PyObject* rows = PyList_New(size);
  for (int r = 0; r < size; r++) {
    PyObject* row = PyTuple_New(count);
    for (Py_ssize_t i = 0; i < count; i++) PyTuple_SetItem(row, i, PyLong_FromLongLong(all[r * own.size() + i]));
    PyList_SetItem(rows, r, row);
  }
  return rows;
}

// The bytes of each rank, cut to what fits into a slot.
PyObject* group_texts(PyObject* self, Args a, Py_ssize_t n) {
  if (!has(n, 2, "texts")) return nullptr;
  char* raw;
  Py_ssize_t length;
  if (PyBytes_AsStringAndSize(a[1], &raw, &length)) return nullptr;
  const std::vector<uint8_t> own(raw, raw + length);
  std::vector<std::vector<uint8_t>> all;
  PyObject* ended = run(of(self), Py_None, kTexts, seconds(a[0]), [&](Group& group) { return group.texts(own, all); });
  if (!ended) return nullptr;
  Py_DECREF(ended);
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(all.size()));
  for (size_t r = 0; r < all.size(); r++)
    PyList_SetItem(list, static_cast<Py_ssize_t>(r),
                   PyBytes_FromStringAndSize(reinterpret_cast<char*>(all[r].data()), static_cast<Py_ssize_t>(all[r].size())));
  return list;
}

PyObject* group_add_buffer(PyObject* self, Args a, Py_ssize_t n) {
  if (!has(n, 3, "add_buffer")) return nullptr;
  uint8_t* first = address(a[0]);
  const size_t stride = bytes(a[1]), nbytes = bytes(a[2]);
  if (PyErr_Occurred()) return nullptr;
  return PyLong_FromUnsignedLongLong(of(self)->group->add_buffer(first, stride, nbytes));
}
PyObject* group_drop_buffer(PyObject* self, PyObject* which) {
  if (!of(self)->is_released) of(self)->group->drop_buffer(PyLong_AsUnsignedLongLong(which));
  Py_RETURN_NONE;
}
PyObject* group_state(PyObject* self, PyObject* rank) {
  const int r = number(rank);
  if (!expect(r >= 0 && r < of(self)->group->size, "no rank of the group")) return nullptr;
  if (of(self)->is_released) return Py_BuildValue("(iiy)", (int)kClosed, 0, "");
  Control& c = of(self)->group->control(r);
  const uint32_t state = c.state.load(std::memory_order_acquire);
  return Py_BuildValue("(iiy#)", (int)state, (int)c.culprit.load(), c.text, (Py_ssize_t)c.text_bytes.load());
}
PyObject* group_fail(PyObject* self, Args a, Py_ssize_t n) {
  if (!has(n, 3, "fail")) return nullptr;
  char* text;
  Py_ssize_t length;
  if (PyBytes_AsStringAndSize(a[2], &text, &length)) return nullptr;
  const int state = number(a[0]), culprit = number(a[1]);
  if (!expect(state == kFailed || state == kGaveUp, "no state of a group that has failed")) return nullptr;
  if (!of(self)->is_released) of(self)->group->fail(static_cast<State>(state), culprit, text, static_cast<size_t>(length));
  Py_RETURN_NONE;
}
PyObject* group_close(PyObject* self, PyObject*) {
  PyGroup* g = of(self);
  if (!g->is_released) {
    g->group->close();
    Unlocked unlocked;
    g->order->close();
  }
  Py_RETURN_NONE;
}
// Lets go of the memory; nothing runs any more.
PyObject* group_release(PyObject* self, PyObject*) {
  PyGroup* g = of(self);
  g->is_released = true;
  Py_CLEAR(g->memory);
  Py_RETURN_NONE;
}
#ifdef UNISONO_FAULTS
PyObject* group_fault_after(PyObject* self, Args a, Py_ssize_t n) {
  if (!has(n, 2, "fault_after")) return nullptr;
  Fault& fault = of(self)->group->fault;
  fault.signal = number(a[1]);
  fault.steps = PyLong_AsLong(a[0]);
  return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
}
#endif
PyObject* group_waited_ns(PyObject* self, void*) {
  Group& g = *of(self)->group;
  return PyLong_FromLongLong(g.patience.waited_ns.load() + g.messages.waited_ns.load());
}
PyObject* get_small_bytes(PyObject* self, void*) { return PyLong_FromSize_t(of(self)->group->small_bytes); }
int set_small_bytes(PyObject* self, PyObject* value, void*) {
  const size_t small_bytes = bytes(value);
  if (PyErr_Occurred()) return -1;
  of(self)->group->small_bytes = small_bytes;
  return 0;
}
int set_way(PyObject* self, PyObject* value, void*) {
  const int way = static_cast<int>(bytes(value));
  if (!expect(way >= Handover::kMeasured && way <= Handover::kStreamed, "no way to hand over bytes")) return -1;
  of(self)->group->set_way(static_cast<Handover::Way>(way));
  return 0;
}

// Group(memory, size, slot_bytes, rank, has_own_core, look, report)
PyObject* group_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *memory, *look, *report;
  Py_ssize_t size, slot_bytes;
  int rank, has_own_core;
  if (!PyArg_ParseTuple(args, "O!nnipOO", memory_type, &memory, &size, &slot_bytes, &rank, &has_own_core, &look, &report))
    return nullptr;
  auto* m = reinterpret_cast<Memory*>(memory);
  const Layout layout{static_cast<size_t>(size), static_cast<size_t>(slot_bytes)};
  if (!expect(size > 1 && layout.slot_bytes / (size - 1) >= kLine, "slots of less than 64 bytes for each other rank"))
    return nullptr;
  if (m->nbytes < layout.total() || rank < 0 || rank >= size)
    return PyErr_Format(PyExc_ValueError, "a segment of %zu bytes is too small for %zd ranks", m->nbytes, size);
  std::unique_ptr<Group> group;
  std::unique_ptr<Order> order;
  try {
    group = std::make_unique<Group>(static_cast<uint8_t*>(m->at), layout, rank, has_own_core);
    order = std::make_unique<Order>(*group);
  } catch (...) {
    translate();
    return nullptr;
  }
  auto* self = reinterpret_cast<PyGroup*>(PyType_GenericAlloc(type, 0));
  if (!self) return nullptr;
  self->memory = Py_NewRef(memory);
  self->look = Py_NewRef(look);
  self->report = Py_NewRef(report);
  self->group = group.release();
  self->order = order.release();
  self->pid = getpid();
  return reinterpret_cast<PyObject*>(self);
}
int group_traverse(PyObject* self, visitproc visit, void* arg) {
  PyGroup* g = of(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(g->memory);
  Py_VISIT(g->look);
  Py_VISIT(g->report);
  return 0;
}
int group_clear(PyObject* self) {
  Py_CLEAR(of(self)->look);
  Py_CLEAR(of(self)->report);
  return 0;
}
void group_free(PyObject* self) {
  PyGroup* g = of(self);
  PyObject_GC_UnTrack(self);
  // In a forked child its thread and its locks are those of the parent; and a callback in the group's
  // own thread may drop the last reference, while that thread still runs.
  if (getpid() == g->pid && !g->order->is_inside()) {
    Unlocked unlocked;
    delete g->order;
    delete g->group;
  }
  Py_XDECREF(g->memory);
  Py_XDECREF(g->look);
  Py_XDECREF(g->report);
  free_object(self);
}

#define FAST(function) reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)(void)>(&guarded<function, PyObject*, Args, Py_ssize_t>)), METH_FASTCALL
PyMethodDef group_methods[] = {
    {"barrier", FAST(group_barrier), "barrier(tensors, timeout_s)"},
    {"all_reduce", FAST(group_all_reduce), "all_reduce(tensors, timeout_s, address, elements, dtype, op, root)"},
    {"reduce_scatter", FAST(group_reduce_scatter), "reduce_scatter(tensors, timeout_s, out, ins, dtype, op, alike)"},
    {"broadcast", FAST(group_broadcast), "broadcast(tensors, timeout_s, address, bytes, dtype, root)"},
    {"all_gather", FAST(group_all_gather), "all_gather(tensors, timeout_s, outs, address, dtype, alike)"},
    {"gather", FAST(group_gather), "gather(tensors, timeout_s, outs, address, bytes, dtype, root)"},
    {"all_to_all", FAST(group_all_to_all), "all_to_all(tensors, timeout_s, outs, ins, dtype)"},
    {"scatter", FAST(group_scatter), "scatter(tensors, timeout_s, out, bytes, ins, dtype, root)"},
    {"agree", FAST(group_agree), "agree(timeout_s, dtype, bytes, digest)"},
    {"ints", FAST(group_ints), "ints(timeout_s, values)"},
    {"texts", FAST(group_texts), "texts(timeout_s, bytes)"},
    {"post", FAST(group_post), "post(sends, recvs, tag, waits)"},
    {"add_buffer", FAST(group_add_buffer), "add_buffer(address of the first region, stride, bytes)"},
    {"drop_buffer", guarded<group_drop_buffer>, METH_O, "drop_buffer(number)"},
    {"state", guarded<group_state>, METH_O, "state(rank): (state, culprit, text)"},
    {"fail", FAST(group_fail), "fail(state, culprit, text)"},
    {"close", guarded<group_close>, METH_NOARGS, "Leave: tell the others, and end the thread after what is queued."},
    {"release", guarded<group_release>, METH_NOARGS, "Let go of the memory."},
#ifdef UNISONO_FAULTS
    {"fault_after", FAST(group_fault_after), "fault_after(steps, signal)"},
#endif
    {nullptr, nullptr, 0, nullptr}};
PyGetSetDef group_getters[] = {
    {"waited_ns", group_waited_ns, nullptr, "Time spent waiting for others so far.", nullptr},
    {"small_bytes", get_small_bytes, set_small_bytes, "Up to here a reduction takes one meeting.", nullptr},
    {"way", nullptr, set_way, "How others are given bytes: 0 as measured, 1 through caches, 2 past them.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot group_slots[] = {{Py_tp_new, reinterpret_cast<void*>(group_new)},
                             {Py_tp_dealloc, reinterpret_cast<void*>(group_free)},
                             {Py_tp_traverse, reinterpret_cast<void*>(group_traverse)},
                             {Py_tp_clear, reinterpret_cast<void*>(group_clear)},
                             {Py_tp_methods, group_methods},
                             {Py_tp_getset, group_getters},
                             {0, nullptr}};
PyType_Spec group_spec = {"unisono._core.Group", sizeof(PyGroup), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, group_slots};

// -- the module -----------------------------------------------------------------------------------

// layout(size, slot_bytes): (bytes of all, bytes that all ranks touch, bytes of one rank's slots,
// offset of the rings, bytes of one ring).
PyObject* layout_of(PyObject*, Args a, Py_ssize_t n) {
  if (!has(n, 2, "layout")) return nullptr;
  const Layout l{bytes(a[0]), bytes(a[1])};
  if (PyErr_Occurred()) return nullptr;
  return Py_BuildValue("(nnnnn)", (Py_ssize_t)l.total(), (Py_ssize_t)l.common_bytes(), (Py_ssize_t)l.own_slots_bytes(),
                       (Py_ssize_t)l.rings(), (Py_ssize_t)l.ring_bytes());
}

PyObject* fence(PyObject*, PyObject*) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  Py_RETURN_NONE;
}

// Runs one pass of an LSTM: its addresses come in the order of its struct, None for null.
template <class Pass>
PyObject* run_lstm(const LstmSizes& sizes, PyObject* addresses) {
  void* at[sizeof(Pass) / sizeof(void*)];
  constexpr Py_ssize_t count = sizeof(at) / sizeof(*at);
  if (!expect(PyTuple_Check(addresses) && PyTuple_Size(addresses) == count, "one address for each tensor of a pass"))
    return nullptr;
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject* x = PyTuple_GetItem(addresses, i);
    at[i] = x == Py_None ? nullptr : address(x);
  }
  if (PyErr_Occurred()) return nullptr;
  Pass pass;
  std::memcpy(&pass, at, sizeof(pass));
  {
    Unlocked unlocked;
    run_pass(sizes, pass);
  }
  Py_RETURN_NONE;
}
template <template <class> class Pass>
PyObject* lstm(PyObject*, Args a, Py_ssize_t n) {
  if (!has(n, 6, "a pass of an LSTM")) return nullptr;
  const LstmSizes sizes{bytes(a[1]), bytes(a[2]), bytes(a[3]), bytes(a[4])};
  if (PyErr_Occurred()) return nullptr;
  return a[0] == Py_True ? run_lstm<Pass<double>>(sizes, a[5]) : run_lstm<Pass<float>>(sizes, a[5]);
}

PyMethodDef module_methods[] = {
    {"map", FAST(map_memory), "map(fd, bytes): memory shared by all who map the file."},
    {"populate", FAST(populate), "populate(address, bytes): give every page memory now; OSError if the host has no more."},
    {"layout", FAST(layout_of), "layout(size, slot_bytes): where things lie in a segment."},
    {"lstm_forward", FAST(lstm<LstmForward>), "lstm_forward(is_double, batch, steps, width, units, addresses)"},
    {"lstm_backward", FAST(lstm<LstmBackward>), "lstm_backward(is_double, batch, steps, width, units, addresses)"},
    {"fence", fence, METH_NOARGS, "fence(): memory is read and written before it, or after it."},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef module_def = {PyModuleDef_HEAD_INIT, "_core", "Collectives and messages over shared memory; the steps of an LSTM.", -1,
                          module_methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__core(void) {
  PyObject* module = PyModule_Create(&module_def);
  if (!module) return nullptr;
  memory_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&memory_spec));
  started_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&started_spec));
  transfers_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&transfers_spec));
  PyObject* group_type = PyType_FromSpec(&group_spec);
  if (!memory_type || !started_type || !transfers_type || !group_type) return nullptr;
  PyModule_AddObjectRef(module, "Group", group_type);
  PyModule_AddIntConstant(module, "VERSION", kVersion);
  Py_DECREF(group_type);
  return module;
}
