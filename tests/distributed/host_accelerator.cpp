// An accelerator made of host memory: its tensors have a device of their own, their data are where the CPU reads them.
//
// Every operation without a kernel here runs on the CPU, on the same memory. So the numbers are those of the CPU, while
// four things are those of a GPU: a call that mixes tensors of both raises, what is allocated is counted to the byte, so
// is each time that the host waits for numbers, and copies on a stream of their own are made as late as they may be, some
// of those to the device as early.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

namespace {

constexpr auto DEVICE = c10::DeviceType::PrivateUse1;
constexpr size_t ALIGNMENT = 64;

c10::Device the_device() {
  return {DEVICE, 0};
}

// --- memory

std::atomic<int64_t> allocated{0}, peak{0};

// --- streams: the computing stream (0) has done its work when a call returns; copies on others wait for an event

struct Step {
  void* to = nullptr;
  const void* from = nullptr;
  size_t size = 0;
  // a wait for the work of another stream, up to a position
  int64_t stream = 0, position = 0;
};

struct Lane {
  std::deque<Step> steps;
  int64_t begun = 0, done = 0;
};

std::recursive_mutex lanes_lock;
std::map<int64_t, Lane> lanes;
std::atomic<int64_t> last_stream{0}, late_copies{0}, reads{0};
thread_local int64_t current_stream = 0;

void enqueue(int64_t stream, const Step& step) {
  std::lock_guard<std::recursive_mutex> lock(lanes_lock);
  lanes[stream].steps.push_back(step);
  ++lanes[stream].begun;
}

// Go on to a position; unless ``waits`` to the first wait for what has not been done.
void advance(int64_t stream, int64_t position, bool waits = true) {
  std::lock_guard<std::recursive_mutex> lock(lanes_lock);
  Lane& lane = lanes[stream];
  while (lane.done < position) {
    Step step = lane.steps.front();
    if (step.stream != 0) {
      if (!waits && lanes[step.stream].done < step.position) {
        return;
      }
      advance(step.stream, step.position);
    } else {
      std::memcpy(step.to, step.from, step.size);
    }
    lane.steps.pop_front();
    ++lane.done;
  }
}

void advance_all() {
  std::lock_guard<std::recursive_mutex> lock(lanes_lock);
  for (auto& [stream, lane] : lanes) {
    advance(stream, lane.begun);
  }
}

bool is_copied(const void* address, size_t size) {
  auto start = reinterpret_cast<uintptr_t>(address);
  auto overlaps = [&](const void* other, size_t length) {
    auto first = reinterpret_cast<uintptr_t>(other);
    return first < start + size && start < first + length;
  };
  for (const auto& [stream, lane] : lanes) {
    for (const Step& step : lane.steps) {
      if (step.size > 0 && (overlaps(step.to, step.size) || overlaps(step.from, step.size))) {
        return true;
      }
    }
  }
  return false;
}

struct Block {
  void* address;
  size_t size, capacity;
};

// freed memory that is still copied: the next allocation has it, as on a GPU
std::vector<Block> copied_blocks;

void* taken_block(size_t& capacity) {
  std::lock_guard<std::recursive_mutex> lock(lanes_lock);
  for (auto each = copied_blocks.begin(); each != copied_blocks.end();) {
    if (!is_copied(each->address, each->capacity)) {
      std::free(each->address);
      each = copied_blocks.erase(each);
    } else if (each->capacity >= capacity) {
      void* address = each->address;
      capacity = each->capacity;
      copied_blocks.erase(each);
      return address;
    } else {
      ++each;
    }
  }
  return nullptr;
}

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  allocated -= static_cast<int64_t>(block->size);
  std::lock_guard<std::recursive_mutex> lock(lanes_lock);
  if (is_copied(block->address, block->capacity)) {
    copied_blocks.push_back(*block);
  } else {
    std::free(block->address);
  }
  delete block;
}

struct CountingAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) {
      return {nullptr, nullptr, &c10::detail::deleteNothing, the_device()};
    }
    size_t capacity = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    void* address = taken_block(capacity);
    if (address == nullptr) {
      address = std::aligned_alloc(ALIGNMENT, capacity);
      TORCH_CHECK(address != nullptr, "no memory for ", size, " bytes");
      // what is read before it is written shows
      std::memset(address, 0xff, size);
    }
    auto* block = new Block{address, size, capacity};
    int64_t now = allocated += static_cast<int64_t>(size);
    for (int64_t highest = peak; now > highest && !peak.compare_exchange_weak(highest, now);) {
    }
    return {block->address, block, &release, the_device()};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& all = stats.allocated_bytes[0];
    all.current = allocated;
    all.peak = peak;
    return stats;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    constexpr size_t total = size_t{1} << 40;
    return {total - allocated.load(), total};
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    peak = allocated.load();
  }
};

CountingAllocator allocator;
REGISTER_ALLOCATOR(DEVICE, &allocator)

// --- device and events

struct Event {
  std::chrono::steady_clock::time_point time;
  int64_t stream, position;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return DEVICE;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return the_device();
  }
  c10::Device getDevice() const override {
    return the_device();
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, current_stream);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, ++last_stream);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = getStream(stream.device());
    current_stream = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  bool queryStream(const c10::Stream& stream) const override {
    std::lock_guard<std::recursive_mutex> lock(lanes_lock);
    return lanes[stream.id()].steps.empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    std::lock_guard<std::recursive_mutex> lock(lanes_lock);
    ++reads;
    advance(stream.id(), lanes[stream.id()].begun);
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    advance_all();
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::recursive_mutex> lock(lanes_lock);
    if (*event == nullptr) {
      *event = new Event;
    }
    *static_cast<Event*>(*event) = {std::chrono::steady_clock::now(), stream.id(), lanes[stream.id()].begun};
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void block(void* event, const c10::Stream& stream) const override {
    auto* awaited = static_cast<Event*>(event);
    if (awaited == nullptr || awaited->stream == 0) {
      return;
    }
    if (stream.id() == 0) {
      advance(awaited->stream, awaited->position);
    } else {
      enqueue(stream.id(), {nullptr, nullptr, 0, awaited->stream, awaited->position});
    }
  }
  bool queryEvent(void* event) const override {
    std::lock_guard<std::recursive_mutex> lock(lanes_lock);
    auto* awaited = static_cast<Event*>(event);
    return lanes[awaited->stream].done >= awaited->position;
  }
  void synchronizeEvent(void* event) const override {
    auto* awaited = static_cast<Event*>(event);
    advance(awaited->stream, awaited->position);
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    auto elapsed = static_cast<Event*>(end)->time - static_cast<Event*>(start)->time;
    return std::chrono::duration<double, std::milli>(elapsed).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  bool isPinnedPtr(const void*) const override {
    return false;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetCPUAllocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto data = allocator.allocate(size);
    std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(size);
  }
};

const bool has_hooks = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// --- operations

// operations after which the host knows what the device has computed
const std::set<std::string> READS = {
    "aten::_local_scalar_dense", "aten::nonzero",    "aten::equal",      "aten::is_nonzero",         "aten::masked_select",
    "aten::repeat_interleave",   "aten::_unique2",   "aten::unique_dim", "aten::unique_consecutive",
};

void free_view(void* context) {
  delete static_cast<c10::Storage*>(context);
}

// The tensors of one call as the CPU sees them.
class Call {
 public:
  explicit Call(const std::string& name) : name_(name) {}

  c10::IValue to_cpu(const c10::IValue& value) {
    if (value.isTensor()) {
      return to_cpu(value.toTensor());
    }
    if (value.isDevice()) {
      return value.toDevice().type() == DEVICE ? c10::Device(c10::kCPU) : value.toDevice();
    }
    if (value.isList()) {
      c10::impl::GenericList converted(value.toList().elementType());
      for (const c10::IValue& each : value.toList()) {
        converted.push_back(to_cpu(each));
      }
      return converted;
    }
    return value;
  }

  c10::IValue to_device(const c10::IValue& value) {
    if (value.isTensor()) {
      return to_device(value.toTensor());
    }
    if (value.isList()) {
      c10::impl::GenericList converted(value.toList().elementType());
      for (const c10::IValue& each : value.toList()) {
        converted.push_back(to_device(each));
      }
      return converted;
    }
    return value;
  }

  void check() const {
    TORCH_CHECK(
        !on_cpu_ || tensors_.empty(),
        name_, ": expected all tensors to be on the same device, but found at least two devices, cpu and ", the_device());
  }

  // An out argument has the size that the operation has given it.
  void resize_outputs() const {
    for (const auto& [seen, own] : tensors_) {
      if (!seen.sizes().equals(own.sizes()) && seen.storage().data() != own.storage().data()) {
        at::native::resize_(own, seen.sizes());
        std::memcpy(own.mutable_data_ptr(), seen.contiguous().const_data_ptr(), seen.numel() * seen.element_size());
      }
    }
  }

 private:
  at::Tensor to_cpu(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      return tensor;
    }
    if (tensor.device().type() != DEVICE) {
      on_cpu_ |= tensor.dim() > 0;
      return tensor;
    }
    auto* key = tensor.storage().unsafeGetStorageImpl();
    auto found = storages_.find(key);
    if (found == storages_.end()) {
      auto* owner = new c10::Storage(tensor.storage());
      c10::DataPtr data(tensor.storage().mutable_data(), owner, &free_view, c10::kCPU);
      c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data), c10::GetCPUAllocator(), true);
      found = storages_.emplace(key, storage).first;
      owners_.emplace(storage.unsafeGetStorageImpl(), tensor.storage());
    }
    auto seen = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    seen.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    tensors_.emplace_back(seen, tensor);
    return seen;
  }

  at::Tensor to_device(const at::Tensor& result) {
    if (!result.defined() || result.device().type() == DEVICE) {
      return result;
    }
    for (const auto& [seen, own] : tensors_) {
      if (seen.is_same(result)) {
        return own;
      }
    }
    auto owner = owners_.find(result.storage().unsafeGetStorageImpl());
    if (owner != owners_.end()) {
      auto view = at::detail::make_tensor<c10::TensorImpl>(
          c10::Storage(owner->second), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), result.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
      return view;
    }
    auto own = at::detail::empty_strided_generic(
        result.sizes(), result.strides(), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), result.scalar_type());
    if (result.numel() > 0) {
      std::memcpy(own.mutable_data_ptr(), result.const_data_ptr(), own.storage().nbytes());
    }
    return own;
  }

  std::string name_;
  bool on_cpu_ = false;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_, owners_;
};

bool reads_mask(const std::string& name, torch::jit::Stack* stack, size_t first) {
  if (name != "aten::index" && name != "aten::index_put_" && name != "aten::index_put" && name != "aten::_index_put_impl_") {
    return false;
  }
  for (const c10::IValue& each : (*stack)[first + 1].toList()) {
    if (each.isTensor() && each.toTensor().defined() && each.toTensor().scalar_type() == at::kBool) {
      return true;
    }
  }
  return false;
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Call call(schema.name());
  size_t first = stack->size() - schema.arguments().size();
  reads += READS.count(schema.name()) > 0 || reads_mask(schema.name(), stack, first);
  for (size_t at = first; at < stack->size(); ++at) {
    (*stack)[at] = call.to_cpu((*stack)[at]);
  }
  call.check();
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.resize_outputs();
  for (size_t at = stack->size() - schema.returns().size(); at < stack->size(); ++at) {
    (*stack)[at] = call.to_device((*stack)[at]);
  }
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

void* data_of(const at::Tensor& tensor) {
  return static_cast<char*>(tensor.storage().mutable_data()) + tensor.storage_offset() * tensor.element_size();
}

// Copies between the two devices; from this one to the host is a read if the caller waits for it.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  bool is_plain = from.is_contiguous() && to.is_contiguous() && from.scalar_type() == to.scalar_type();
  if (non_blocking && current_stream != 0 && is_plain && from.nbytes() == to.nbytes()) {
    enqueue(current_stream, {data_of(to), data_of(from), to.nbytes()});
    if (++late_copies % 2 && to.device().type() == DEVICE) {
      advance(current_stream, lanes[current_stream].begun, false);
    }
    return to;
  }
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  Call call("aten::_copy_from");
  reads += from.device().type() == DEVICE && to.device().type() != DEVICE && !non_blocking;
  torch::jit::Stack stack{call.to_cpu(c10::IValue(to)), call.to_cpu(c10::IValue(from)), false};
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  return to;
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage storage) {
  auto size = static_cast<int64_t>(storage.nbytes() / self.element_size());
  return at::native::set_storage_cpu_(self, std::move(storage), 0, size, {});
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

// --- attention in one kernel, as on a GPU: without it the probabilities of all pairs of tokens would be allocated

int64_t choose_attention(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::overrideable);
}

using Attention = std::tuple<
    at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor>;

template <typename... Results, typename Function>
std::tuple<Results...> computed_on_cpu(const char* name, Function function, std::vector<at::Tensor> tensors) {
  Call call(name);
  for (auto& each : tensors) {
    each = call.to_cpu(c10::IValue(each)).toTensor();
  }
  call.check();
  return std::apply(
      [&](auto... each) { return std::tuple<Results...>(call.to_device(c10::IValue(each)).toTensor()...); },
      function(tensors));
}

Attention attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& bias,
    double dropout, bool causal, bool, std::optional<double> scale) {
  auto [output, logsumexp] = computed_on_cpu<at::Tensor, at::Tensor>(
      "attention",
      [&](const std::vector<at::Tensor>& seen) {
        auto mask = seen[3].defined() ? std::optional<at::Tensor>(seen[3]) : std::nullopt;
        return at::_scaled_dot_product_flash_attention_for_cpu(seen[0], seen[1], seen[2], dropout, causal, mask, scale);
      },
      {query, key, value, bias.value_or(at::Tensor())});
  return {output, logsumexp, {}, {}, query.sym_size(2), key.sym_size(2), {}, {}, {}};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& bias, std::array<bool, 4>, const at::Tensor& output, const at::Tensor& logsumexp,
    const at::Tensor&, const at::Tensor&, c10::SymInt, c10::SymInt, double dropout, bool causal, const at::Tensor&,
    const at::Tensor&, std::optional<double> scale) {
  auto [of_query, of_key, of_value] = computed_on_cpu<at::Tensor, at::Tensor, at::Tensor>(
      "attention's gradient",
      [&](const std::vector<at::Tensor>& seen) {
        auto mask = seen[6].defined() ? std::optional<at::Tensor>(seen[6]) : std::nullopt;
        return at::_scaled_dot_product_flash_attention_for_cpu_backward(
            seen[0], seen[1], seen[2], seen[3], seen[4], seen[5], dropout, causal, mask, scale);
      },
      {gradient, query, key, value, output, logsumexp, bias});
  return {of_query, of_key, of_value, {}};
}

// ``tensor.data = other`` may change the device, as it may from the CPU to CUDA.
bool may_take_data(const at::Tensor&, const at::Tensor&) {
  return true;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", at::native::resize_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("_has_compatible_shallow_copy_type", may_take_data);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  // one kernel on CPUs and on GPUs; elsewhere torch composes it of eight, whose results exist at the same time
  m.impl("silu_backward", torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
  m.impl("_scaled_dot_product_fused_attention_overrideable", attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", attention_backward);
}

// Collectives run over the back end of the CPU.
TORCH_LIBRARY_IMPL(c10d, PrivateUse1, m) {
  for (const char* name : {
           "allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_", "allreduce_",
           "allreduce_coalesced_", "alltoall_", "alltoall_base_", "barrier", "broadcast_", "gather_", "recv_",
           "recv_any_source_", "reduce_", "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_",
           "scatter_", "send"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
  }
}

TORCH_LIBRARY(accelerator, m) {
  m.def("host_reads() -> int", []() { return reads.load(); });
  m.def("late_copies() -> int", []() { return late_copies.load(); });
}

} // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose_attention)
}
