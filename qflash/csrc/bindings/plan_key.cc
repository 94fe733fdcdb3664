// _native.plan_key: everything a plan depends on, as a key of the plan cache.
//
// It is built on every eager call, from about ten attributes of three to twenty arrays. Python code would take several
// times as long as the interpreter's own functions called from here.

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace {

PyObject* interned(const char* text) { return PyUnicode_InternFromString(text); }

// The attributes of an array that a plan depends on, by their names in the frameworks.
struct Names {
  PyObject* shape = interned("shape");
  PyObject* dtype = interned("dtype");
  PyObject* stride = interned("stride");  // PyTorch's, a method
  PyObject* device = interned("device");
  PyObject* requires_grad = interned("requires_grad");
  PyObject* strides = interned("strides");  // NumPy's
  PyObject* flags = interned("flags");
  PyObject* aligned = interned("aligned");
};

const Names& names() {
  static const Names found;
  return found;
}

// Whether attribute `name` of x is True; -1 with an exception set if there is none.
int is_true(PyObject* x, PyObject* name) {
  PyObject* answer = PyObject_GetAttr(x, name);
  if (!answer) return -1;
  const int truth = answer == Py_True;
  Py_DECREF(answer);
  return truth;
}

// A tuple under construction, with a known maximum size.
class Key {
 public:
  explicit Key(Py_ssize_t most) : tuple_(PyTuple_New(most)) {}
  ~Key() { Py_XDECREF(tuple_); }

  // Takes ownership of a reference; false if it is null.
  bool take(PyObject* item) {
    if (!item || !tuple_) return false;
    PyTuple_SET_ITEM(tuple_, used_++, item);
    return true;
  }
  bool add(PyObject* item) {
    Py_INCREF(item);
    return take(item);
  }
  PyObject* finish() {
    if (_PyTuple_Resize(&tuple_, used_) != 0) return nullptr;
    PyObject* done = tuple_;
    tuple_ = nullptr;
    return done;
  }

 private:
  PyObject* tuple_;
  Py_ssize_t used_ = 0;
};

constexpr Py_ssize_t kPerArray = 4;

bool add_tensor(Key& key, PyObject* x, bool& wants_gradient) {
  if (!key.take(PyObject_GetAttr(x, names().shape)) || !key.take(PyObject_CallMethodNoArgs(x, names().stride)) ||
      !key.take(PyObject_GetAttr(x, names().dtype)) || !key.take(PyObject_GetAttr(x, names().device)))
    return false;
  if (wants_gradient) return true;
  const int wants = is_true(x, names().requires_grad);
  wants_gradient = wants == 1;
  return wants >= 0;
}

// `plain` becomes false for an array that is not aligned, which every plan rejects.
bool add_ndarray(Key& key, PyObject* x, bool& plain) {
  if (!key.take(PyObject_GetAttr(x, names().shape)) || !key.take(PyObject_GetAttr(x, names().strides)) ||
      !key.take(PyObject_GetAttr(x, names().dtype)))
    return false;
  PyObject* flags = PyObject_GetAttr(x, names().flags);
  const int aligned = flags ? is_true(flags, names().aligned) : -1;
  Py_XDECREF(flags);
  plain = aligned == 1;
  return aligned >= 0;
}

// Numbers are followed by their type, because True, 1 and 1.0 are equal in a dict but not in a plan. None, bools and
// strings then equal nothing of another type and need none.
bool add_word(Key& key, PyObject* word) {
  if (!key.add(word)) return false;
  if (word == Py_None || PyBool_Check(word) || PyUnicode_CheckExact(word)) return true;
  return key.add(reinterpret_cast<PyObject*>(Py_TYPE(word)));
}

Py_ssize_t room_of(PyObject* word) { return PyTuple_Check(word) ? 2 + 2 * PyTuple_GET_SIZE(word) : 2; }

// plan_key(op, arrays, words, classes, torch): a tuple; None if an array is neither None nor of one of `classes`, or
// lacks an array's attributes. arrays and words are tuples or lists; torch: whether arrays are tensors, not ndarrays.
PyObject* plan_key(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 5 || !PyTuple_Check(args[3])) {
    PyErr_SetString(PyExc_TypeError,
                    "plan_key takes an operation, its arrays, its words, a tuple of classes and a bool");
    return nullptr;
  }
  PyObject* const arrays = PySequence_Fast(args[1], "arrays are no sequence");
  PyObject* const words = arrays ? PySequence_Fast(args[2], "words are no sequence") : nullptr;
  if (!words) {
    Py_XDECREF(arrays);
    return nullptr;
  }
  const Py_ssize_t array_count = PySequence_Fast_GET_SIZE(arrays), word_count = PySequence_Fast_GET_SIZE(words);
  PyObject** const given = PySequence_Fast_ITEMS(arrays);
  PyObject** const said = PySequence_Fast_ITEMS(words);
  Py_ssize_t most = 3 + kPerArray * array_count;
  for (Py_ssize_t i = 0; i < word_count; ++i) most += room_of(said[i]);

  Key key(most);
  bool good = key.add(args[0]), plain = true, wants_gradient = false;
  unsigned long long present = 0;
  for (Py_ssize_t i = 0; good && plain && i < array_count; ++i) {
    if (given[i] == Py_None) continue;
    plain = false;
    for (Py_ssize_t c = 0; !plain && c < PyTuple_GET_SIZE(args[3]); ++c)
      plain = reinterpret_cast<PyObject*>(Py_TYPE(given[i])) == PyTuple_GET_ITEM(args[3], c);
    if (plain)
      good = args[4] == Py_True ? add_tensor(key, given[i], wants_gradient) : add_ndarray(key, given[i], plain);
    present |= 1ull << i;
  }
  for (Py_ssize_t i = 0; good && plain && i < word_count; ++i) {
    good = add_word(key, said[i]);
    if (good && PyTuple_Check(said[i]))
      for (Py_ssize_t j = 0; good && j < PyTuple_GET_SIZE(said[i]); ++j)
        good = key.add(reinterpret_cast<PyObject*>(Py_TYPE(PyTuple_GET_ITEM(said[i], j))));
  }
  good =
      good && plain && key.take(PyLong_FromUnsignedLongLong(present)) && key.add(wants_gradient ? Py_True : Py_False);
  Py_DECREF(arrays);
  Py_DECREF(words);
  if (good) return key.finish();
  if (!plain || PyErr_ExceptionMatches(PyExc_AttributeError) || PyErr_ExceptionMatches(PyExc_RuntimeError)) {
    PyErr_Clear();  // planning the call reports what is wrong with it
    Py_RETURN_NONE;
  }
  return nullptr;
}

PyMethodDef kMethod = {
    "plan_key", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(plan_key)), METH_FASTCALL,
    "plan_key(op, arrays, words, classes, torch) -> tuple | None\n\nA key of the cache of plans, or None."};

}  // namespace

void bind_plan_key(py::module_& module) {
  module.add_object("plan_key", py::reinterpret_steal<py::object>(PyCFunction_New(&kMethod, nullptr)));
}
