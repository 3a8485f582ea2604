// Two CUDA devices made of the memory and the kernels of the host.
//
// Tensors on them are torch's: device cuda:0, dispatch key CUDA, so Python code, autograd, autocast and
// kernels that are put in front of torch's for CUDA take the way they take on a GPU. What arrives at
// the dispatch key without a kernel is run by the kernel of the CPU on tensors that share the memory.
// Like a GPU it refuses tensors of two devices in one call, has its own random numbers, and its
// kernels have a behaviour (see pretend.py): torch refuses them in deterministic mode, or their last
// bits drift from call to call.
//
// What it cannot show: what the kernels of a GPU compute, in which order, and how fast.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace at {  // where the registry of hooks wants to be used
namespace {

constexpr c10::DeviceIndex kDevices = 2;
using Guard = c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>;

Generator& device_generator(c10::DeviceIndex index) {
  // never destroyed, like all that threads of autograd may ask for while the process ends
  static auto& generators = *new std::vector<Generator>{
      at::detail::createCPUGenerator(), at::detail::createCPUGenerator()};
  return generators.at(index < 0 ? Guard::getDeviceIndex() : index);
}

// What torch asks a CUDA library, as far as autograd, checkpoints and random numbers need answers.
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex current_device() const override { return Guard::getDeviceIndex(); }
  c10::DeviceIndex getCurrentDevice() const override { return Guard::getDeviceIndex(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = Guard::getDeviceIndex();
    if (index >= 0) Guard::setDeviceIndex(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  int getNumGPUs() const override { return kDevices; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  const Generator& getDefaultGenerator(DeviceIndex index) const override {
    return device_generator(index);
  }
  Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  std::string showConfig() const override { return "  - CUDA made of the host\n"; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace
}  // namespace at

namespace {

using at::Guard;

c10::Device current() { return {c10::DeviceType::CUDA, Guard::getDeviceIndex()}; }

const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

// ---- memory -----------------------------------------------------------------------------------

// Bytes in tensors of the device: now, and at most since the peak was set back.
std::atomic<int64_t> bytes_now{0}, bytes_peak{0};

struct Held {
  c10::DataPtr host;
  int64_t bytes;
};

void release(void* pointer) {
  auto* held = static_cast<Held*>(pointer);
  bytes_now -= held->bytes;
  delete held;
}

c10::DataPtr on_device(c10::DataPtr host, size_t bytes, c10::Device device) {
  void* data = host.get();
  const int64_t now = bytes_now += static_cast<int64_t>(bytes);
  for (int64_t peak = bytes_peak; now > peak && !bytes_peak.compare_exchange_weak(peak, now);) {
  }
  return {data, new Held{std::move(host), static_cast<int64_t>(bytes)}, &release, device};
}

struct HostAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    return on_device(c10::GetCPUAllocator()->allocate(bytes), bytes, current());
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
auto& allocator = *new HostAllocator;

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &allocator, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &allocator, kKeys,
                                           c10::dtype_or_default(dtype));
}

at::Tensor& set_part(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                     at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.empty() && !size.empty()) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  impl->set_storage_offset(offset);
  return self;
}

at::Tensor& set_whole(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_part(self, std::move(source), 0, {count}, {1});
}

// cuDNN's and MIOpen's forms are not there.
bool no_library(const at::Tensor&, const at::Tensor&, at::IntArrayRef, at::IntArrayRef, int64_t) {
  return false;
}

// ---- one call ---------------------------------------------------------------------------------

// Operators that take tensors of the host as well on a GPU: copies, also between devices, and indices.
const auto& kMixed = *new std::set<std::string>{
    "aten::copy_", "aten::_copy_from", "aten::index", "aten::_unsafe_index", "aten::index_put",
    "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put",
    "aten::_has_compatible_shallow_copy_type"};

// Tensors of the device and their twins on the host, for the length of a call.
class Call {
 public:
  explicit Call(const std::string& name) : name_(name) {}

  // What the caller asks for, for a result of no tensor.
  void make_on(c10::Device device) { device_ = device.has_index() ? device : current(); }

  c10::DeviceIndex index() const { return device_.value_or(current()).index(); }

  at::Tensor lend(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      host_seen_ = true;
      if (tensor.dim()) stranger_ = tensor;  // a number from the host may go with anything
      return tensor;
    }
    const bool copies = name_ == "aten::copy_" || name_ == "aten::_copy_from";
    if (device_ && *device_ != tensor.device() && tensor.dim() && !copies) other_ = tensor;
    if (!device_ || copies) device_ = tensor.device();
    if (tensor.is_sparse()) {
      for (const auto& twin : twins_)
        if (twin.device.is_same(tensor)) return twin.host;
      const auto host = at::_sparse_coo_tensor_unsafe(
          lend(tensor._indices()), lend(tensor._values()), tensor.sizes(), tensor.options().device(at::kCPU),
          tensor.is_coalesced());
      twins_.push_back({tensor, host, nullptr});
      return host;
    }
    c10::Storage shared;
    for (const auto& twin : twins_) {
      if (twin.device.is_same(tensor)) return twin.host;
      if (!twin.device.is_sparse() && twin.device.storage().is_alias_of(tensor.storage())) shared = twin.host.storage();
    }
    const auto& storage = tensor.storage();
    if (!shared)
      shared = c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                            c10::DataPtr(storage.mutable_data(), c10::Device(c10::kCPU)),
                            c10::GetCPUAllocator(), /*resizable=*/true);
    auto host = at::detail::make_tensor<c10::TensorImpl>(
        std::move(shared), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    host.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
    host.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
    host._set_conj(tensor.is_conj());
    host._set_neg(tensor.is_neg());
    twins_.push_back({tensor, host, storage.mutable_data()});
    return host;
  }

  // A copy between the two: the host waits for the device.
  bool waits() const { return name_ == "aten::copy_" && device_ && host_seen_; }

  void refuse_mixture() const {
    const auto& wrong = other_.defined() ? other_ : stranger_;
    TORCH_CHECK(!device_ || !wrong.defined() || (!other_.defined() && kMixed.count(name_)),
                "Expected all tensors to be on the same device, but found at least two devices, ",
                *device_, " and ", wrong.device(), "! (", name_, ", of the second: shape ",
                wrong.sizes(), ")");
  }

  // What was resized on the host has its new memory and shape on the device.
  void settle() {
    for (auto& twin : twins_) {
      if (twin.host.is_sparse()) {  // an operator in place has given it other parts
        twin.device.unsafeGetTensorImpl()->shallow_copy_from(
            sparse(twin.host).getIntrusivePtr());
        continue;
      }
      const auto& here = twin.device.storage();
      const auto& there = twin.host.storage();
      if (there.data() != twin.data && there.data() != here.data()) {
        const auto bytes = there.nbytes();
        c10::DataPtr borrowed(there.mutable_data(), c10::Device(c10::kCPU));
        auto memory = there.unsafeGetStorageImpl()->set_data_ptr(std::move(borrowed));
        here.unsafeGetStorageImpl()->set_data_ptr_noswap(
            on_device(std::move(memory), bytes, here.device()));
        here.unsafeGetStorageImpl()->set_nbytes(bytes);
      }
      auto* impl = twin.device.unsafeGetTensorImpl();
      if (impl->sizes() != twin.host.sizes() || impl->strides() != twin.host.strides() ||
          impl->storage_offset() != twin.host.storage_offset()) {
        impl->set_sizes_and_strides(twin.host.sizes(), twin.host.strides());
        impl->set_storage_offset(twin.host.storage_offset());
      }
    }
  }

  at::Tensor sparse(const at::Tensor& host) const {
    return at::_sparse_coo_tensor_unsafe(
        take(host._indices()), take(host._values()), host.sizes(),
        host.options().device(device_.value_or(current())), host.is_coalesced());
  }

  at::Tensor take(const at::Tensor& result) const {
    if (!result.defined() || result.is_cuda()) return result;
    c10::Storage storage;
    for (const auto& twin : twins_)
      if (twin.host.is_same(result)) return twin.device;
    if (result.is_sparse()) return sparse(result);
    for (const auto& twin : twins_) {
      if (!twin.host.is_sparse() && twin.host.storage().is_alias_of(result.storage())) storage = twin.device.storage();
    }
    if (!storage) {
      // memory that the kernel made lives as long as its tensor of the host
      c10::DataPtr held(result.storage().mutable_data(), new at::Tensor(result),
                        [](void* tensor) { delete static_cast<at::Tensor*>(tensor); },
                        c10::Device(c10::kCPU));
      storage = c10::Storage(c10::Storage::use_byte_size_t(), result.storage().nbytes(),
                             on_device(std::move(held), result.storage().nbytes(),
                                       device_.value_or(current())),
                             &allocator, /*resizable=*/true);
    }
    auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), kKeys, result.dtype());
    out.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides());
    out.unsafeGetTensorImpl()->set_storage_offset(result.storage_offset());
    return out;
  }

 private:
  struct Twin {
    at::Tensor device, host;
    void* data;
  };
  std::string name_;
  std::vector<Twin> twins_;
  at::Tensor stranger_, other_;  // of the host; of another device
  std::optional<c10::Device> device_;
  bool host_seen_ = false;
};

template <typename Change>
void change_tensors(c10::IValue& value, Change change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    std::vector<at::Tensor> changed;
    for (const at::Tensor& tensor : value.toTensorVector()) changed.push_back(change(tensor));
    value = c10::List<at::Tensor>(changed);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (std::optional<at::Tensor> tensor : value.toOptionalTensorList())
      changed.push_back(tensor ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    value = changed;
  }
}

// ---- behaviour of kernels ---------------------------------------------------------------------

// Bits of a behaviour.
enum { kRefusedByTorch = 1, kDriftsUnderFlag = 2, kDriftsWithoutFlag = 4, kDriftsWithoutCudnnFlag = 8 };
auto& behaviour = *new std::map<std::string, int>;
auto& calls = *new std::map<std::string, int>;

void drift(const at::Tensor& tensor) {
  // seeded by the system, as the order in which threads arrive is
  static thread_local std::minstd_rand dice{std::random_device{}()};
  if (!tensor.defined() || !tensor.is_non_overlapping_and_dense() || !tensor.is_floating_point())
    return;
  // One less in the bits of a number, without its sign, is the next number towards zero.
  const auto step = [&](auto* bits, auto sign) {
    for (int64_t i = 0; i < tensor.numel(); ++i)
      if (dice() & 256 && bits[i] & ~sign) --bits[i];
  };
  void* data = tensor.mutable_data_ptr();
  switch (tensor.element_size()) {
    case 2: step(static_cast<uint16_t*>(data), uint16_t(1u << 15)); break;
    case 4: step(static_cast<uint32_t*>(data), uint32_t(1) << 31); break;
    case 8: step(static_cast<uint64_t*>(data), uint64_t(1) << 63); break;
  }
}

bool drifts(int how) {
  const auto& context = at::globalContext();
  return how & kDriftsUnderFlag || (how & kDriftsWithoutFlag && !context.deterministicAlgorithms()) ||
         (how & kDriftsWithoutCudnnFlag && !context.deterministicCuDNN() &&
          !context.deterministicAlgorithms());
}

// What torch does not refuse of an operator that it refuses: counts, and losses that are not summed.
bool ordered_form(const std::string& name, const c10::IValue* arguments) {
  return (name == "aten::bincount" && arguments[1].isNone()) ||
         (name == "aten::nll_loss2d_forward" && arguments[3].toInt() == 0);
}

// What index_put runs on a GPU beside its kernel (IndexingUtils.h, Indexing.cu). A mask becomes
// indices, and the host waits for their number. For sums, and under the flag, indices are sorted,
// after the host has waited for the largest and the least, unless their range is known.
void count_index_put(const c10::IValue* arguments) {
  int masks = 0, indices = 0;
  for (const std::optional<at::Tensor>& index : arguments[1].toOptionalTensorVector()) {
    if (!index || !index->defined()) continue;
    const bool mask = index->scalar_type() == at::kBool || index->scalar_type() == at::kByte;
    masks += mask && index->is_cuda();
    indices += mask ? index->dim() : 1;
  }
  const at::Tensor& value = arguments[2].toTensor();
  const bool adds = arguments[3].toBool(), known = arguments[4].toBool();
  if (masks && !adds && value.numel() == 1 && value.is_cpu()) return;  // this is masked_fill
  if (masks) calls["aten::nonzero"] += masks;
  if (!adds && !at::globalContext().deterministicAlgorithms()) return;
  calls["index_put, sorted"] += 3 + 2 * indices;  // arange, sort, division; remainder, product
  if (known) return;
  calls["index_put, range"] += 2 * indices;
  calls["aten::_local_scalar_dense"] += 2 * indices;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const size_t start = stack->size() - arguments.size();
  const auto known = behaviour.find(schema.name());
  const int how = known == behaviour.end() || ordered_form(schema.name(), &(*stack)[start])
                      ? 0 : known->second;
  ++calls[schema.name()];
  if (schema.name() == "aten::_index_put_impl_") count_index_put(&(*stack)[start]);
  if (how & kRefusedByTorch) at::globalContext().alertNotDeterministic(schema.name());

  Call call(schema.name());
  bool to_host = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[start + i];
    change_tensors(value, [&](const at::Tensor& tensor) { return call.lend(tensor); });
    if (value.isDevice()) {
      to_host = value.toDevice().is_cpu();
      if (!to_host) call.make_on(value.toDevice());
      value = c10::Device(c10::kCPU);
    }
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[start + i];
    if (value.isNone() && arguments[i].name() == "generator")
      value = at::device_generator(call.index());
  }
  call.refuse_mixture();
  // not if the caller asks not to wait, with pinned memory
  if (call.waits() && !(*stack)[stack->size() - 1].toBool()) ++calls["between host and device"];
  // the last argument of the form that counts repetitions is the size of its result
  if (schema.name() == "aten::repeat_interleave" && (*stack)[stack->size() - 1].isNone())
    ++calls["repeat_interleave without output_size"];
  op.callBoxed(stack);
  call.settle();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (drifts(how) && value.isTensor()) drift(value.toTensor());
    if (!to_host) change_tensors(value, [&](const at::Tensor& tensor) { return call.take(tensor); });
  }
}

// torch's topk for NVIDIA GPUs. It chooses by prefix scans: of equal values the lower indices, with
// -0 below 0. Unsorted, it writes what is better than the k-th value and then what equals it, both by
// index; sorted, in no order that it promises for equal values, here the reverse.
std::tuple<at::Tensor&, at::Tensor&> topk(const at::Tensor& self, int64_t k, int64_t dim, bool largest,
                                          bool sorted, at::Tensor& values, at::Tensor& indices) {
  const auto counted = calls;
  const at::Tensor host = self.cpu();
  const auto stable_order = [&](const at::Tensor& keys, bool descending) {
    return std::get<1>(keys.sort(/*stable=*/true, dim, descending));
  };
  at::Tensor order = stable_order(host.signbit(), !largest);
  order = order.gather(dim, stable_order(host.gather(dim, order), largest)).narrow(dim, 0, k);
  if (k && !sorted) {
    const auto kth = host.gather(dim, order.narrow(dim, k - 1, 1));
    const auto last = host.gather(dim, order).eq(kth).to(at::kLong).mul(host.size(dim));
    order = order.gather(dim, stable_order(order.add(last), false));
  } else if (k) {
    order = order.flip(dim);
    order = order.gather(dim, stable_order(host.gather(dim, order), largest));
  }
  values.resize_(order.sizes()).copy_(host.gather(dim, order));
  indices.resize_(order.sizes()).copy_(order);
  calls = counted;
  ++calls["aten::topk"];
  return {values, indices};
}

// ---- registration -----------------------------------------------------------------------------

const bool guarded = [] {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(
      new Guard);
  return true;
}();

TORCH_LIBRARY(host_cuda, m) {
  m.def("adopt(Generator? generator, int index) -> ()",
        [](std::optional<at::Generator> generator, int64_t index) {
          at::device_generator(static_cast<c10::DeviceIndex>(index)) = *generator;
        });
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("set_.source_Storage", TORCH_FN(set_whole));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_part));
  m.impl("topk.values", TORCH_FN(topk));
  m.impl("_use_cudnn_ctc_loss", TORCH_FN(no_library));
  m.impl("_use_miopen_ctc_loss", TORCH_FN(no_library));
  // these have a form for all devices that goes on to kernels of each
  for (const char* name : {"copy_", "convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Sparse tensors are made of two others; what computes with them is run by the kernels of the host.
at::Tensor sparse_empty(int64_t sparse_dim, int64_t dense_dim, at::IntArrayRef size,
                        std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                        std::optional<at::Device> device, std::optional<bool> pin) {
  const c10::OptionalDeviceGuard guard(device);
  return at::native::new_with_dims_sparse(sparse_dim, dense_dim, size, dtype, layout, device, pin);
}

at::Tensor sparse_of(int64_t sparse_dim, int64_t dense_dim, c10::SymIntArrayRef size,
                     const at::Tensor& indices, const at::Tensor& values,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                     std::optional<at::Device> device, std::optional<bool> pin,
                     std::optional<bool> is_coalesced) {
  const c10::DeviceGuard guard(values.device());
  return at::native::new_with_dims_and_tensor_sparse_symint(
      sparse_dim, dense_dim, size, indices, values, dtype, layout, device, pin, is_coalesced);
}

TORCH_LIBRARY_IMPL(aten, SparseCUDA, m) {
  m.impl("_sparse_coo_tensor_with_dims", TORCH_FN(sparse_empty));
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", TORCH_FN(sparse_of));
  m.impl("sparse_dim", TORCH_FN(at::native::sparse_dim_sparse));
  m.impl("dense_dim", TORCH_FN(at::native::dense_dim_sparse));
  m.impl("_nnz", TORCH_FN(at::native::_nnz_sparse));
  m.impl("is_coalesced", TORCH_FN(at::native::is_coalesced_sparse));
  m.impl("_coalesced_", TORCH_FN(at::native::_coalesced_sparse_));
  m.impl("_indices", TORCH_FN(at::native::_indices_sparse));
  m.impl("_values", TORCH_FN(at::native::_values_sparse));
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// All others of the host: before a fallback, torch would take their forms for any kind of tensor.
const auto& others = *[] {
  auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::SparseCUDA,
                                     __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (op && name.getNamespace() == "aten" &&
        op->hasKernelForDispatchKey(c10::DispatchKey::SparseCPU) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::SparseCUDA))
      library->impl(c10::toString(name).c_str(),
                    torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  return library;
}();

}  // namespace

extern "C" int get_device() { return Guard::getDeviceIndex(); }
// Returns the device before; a negative index changes nothing.
extern "C" int set_device(int index) {
  const int before = Guard::getDeviceIndex();
  if (index >= 0) Guard::setDeviceIndex(static_cast<c10::DeviceIndex>(index));
  return before;
}
extern "C" void set_behaviour(const char* name, int how) { behaviour[name] = how; }
extern "C" int count_calls(const char* name) { return calls.count(name) ? calls[name] : 0; }
extern "C" void forget_calls() { calls.clear(); }
extern "C" const char* all_calls() {
  static std::string lines;
  lines.clear();
  for (const auto& [name, count] : calls) lines += name + "\t" + std::to_string(count) + "\n";
  return lines.c_str();
}
extern "C" int64_t memory_now() { return bytes_now; }
extern "C" int64_t memory_peak() { return bytes_peak; }
extern "C" void reset_memory_peak() { bytes_peak = bytes_now.load(); }
