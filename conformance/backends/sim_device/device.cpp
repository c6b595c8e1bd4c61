// A simulated accelerator as torch's PrivateUse1 device: memory, streams, events, kernels and a race detector.
//
// Kernels run at once, on the thread that launches them, so a run is deterministic. What would run concurrently on a
// real accelerator is told by logical clocks: every stream has one, and so has the host. Launching a kernel orders it
// after what the host has seen; an event carries its stream's clock to whoever waits for it. Two accesses to the same
// bytes of which one writes, and which no clock orders, are a race, whatever the bytes happened to be.
//
// Device memory is mapped twice: tensors hold addresses that no load or store may touch, kernels use the other mapping.

// torch's headers declare all of its operators, which takes most of a compilation, unless they are told not to.
#define AT_PER_OPERATOR_HEADERS

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/nextafter.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kNumDevices = 2;
constexpr size_t kArenaBytes = size_t(1) << 33;  // address space, not memory: pages come when they are first written
constexpr size_t kGranularity = 512;
constexpr size_t kMostReports = 64;
constexpr int kHost = 0;

using Clock = std::vector<uint64_t>;

struct Access {
  int agent;
  uint64_t epoch;
  size_t begin, end;
  bool write;
  std::string operation;
};

struct Block {
  size_t bytes;
  int device, agent;                          // the stream that allocated it
  std::vector<Access> accesses;               // survive a free: who reuses the memory must be ordered after them
  std::set<int> recorded;                     // other streams that record_stream named
  std::vector<std::pair<int, uint64_t>> due;  // while freed: what must be over before it is used again
};

struct Delivery {  // a result that comes when somebody is ordered after it; on the host: when the host is
  int agent;
  uint64_t epoch;
  char* target;
  std::vector<char> bytes;
  bool to_host = false;
  c10::intrusive_ptr<c10d::Work> work;  // of a collective: what brings `result` from the other ranks
  at::Tensor view, result;
};

struct Lent {  // pinned memory that the device still reads: as it was when the copy was launched
  int agent;
  uint64_t epoch;
  const char* place;
  std::vector<char> bytes;
  std::string operation;
};

struct Event {
  Clock clock;
  int agent = -1;
  uint64_t time = 0;  // in milliseconds, of which every operation takes one
};

std::recursive_mutex mutex;
char* arena_device[kNumDevices];
char* arena_kernel[kNumDevices];
size_t arena_used[kNumDevices];
std::map<uintptr_t, Block> blocks;
std::map<std::tuple<int, int, size_t>, std::vector<uintptr_t>> free_blocks;
std::vector<uintptr_t> limbo;
size_t bytes_now[kNumDevices], bytes_peak[kNumDevices];
std::vector<Clock> clocks(1, Clock(1, 0));
std::map<std::pair<int, int64_t>, int> agents;
std::vector<std::string> agent_names{"the host"};
std::vector<Delivery> deliveries;
std::vector<Lent> lent;
std::vector<std::string> races, syncs;
std::deque<std::pair<std::string, std::string>> trace;
bool late = false, tracing = false;
uint64_t num_operations = 0;
uint64_t rounding_seed = 1;
int64_t next_stream_id = 1;
thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream[kNumDevices] = {};
thread_local std::string label;

// ---- addresses

char* kernel_address(const void* address) {
  auto* p = static_cast<char*>(const_cast<void*>(address));
  for (int d = 0; d < kNumDevices; d++)
    if (arena_device[d] && p >= arena_device[d] && p < arena_device[d] + kArenaBytes) return arena_kernel[d] + (p - arena_device[d]);
  return p;
}

void open_arena(int device) {
  if (arena_device[device]) return;
  int file = memfd_create("sim_device", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0 && ftruncate(file, kArenaBytes) == 0, "the simulated device found no memory");
  void* kernel = mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  void* hidden = mmap(nullptr, kArenaBytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  TORCH_CHECK(kernel != MAP_FAILED && hidden != MAP_FAILED, "the simulated device found no address space");
  arena_kernel[device] = static_cast<char*>(kernel);
  arena_device[device] = static_cast<char*>(hidden);
}

// ---- clocks

int agent_of(c10::Stream stream) {
  auto key = std::make_pair(int(stream.device_index()), int64_t(stream.id()));
  auto found = agents.find(key);
  if (found != agents.end()) return found->second;
  int agent = int(clocks.size());
  agents[key] = agent;
  clocks.emplace_back(agent + 1, 0);
  std::ostringstream name;
  name << (stream.id() == 0 ? "the default stream" : "stream " + std::to_string(stream.id())) << " of sim:" << int(stream.device_index());
  agent_names.push_back(name.str());
  return agent;
}

c10::Stream stream_of(int device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device), current_stream[device]);
}

uint64_t seen(const Clock& clock, int agent) { return size_t(agent) < clock.size() ? clock[agent] : 0; }

void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); i++) clock[i] = std::max(clock[i], other[i]);
}

void take(size_t index) {
  auto one = std::move(deliveries[index]);
  deliveries.erase(deliveries.begin() + index);
  if (!one.work) {
    memcpy(one.target, one.bytes.data(), one.bytes.size());
    return;
  }
  if (!one.work->isCompleted()) one.work->wait();  // a receipt that is over would wait for another message
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset);
  one.view.copy_(one.result);
}

void deliver(const Clock& clock) {
  bool is_host = &clock == &clocks[kHost];
  for (size_t i = 0; i < deliveries.size();) {
    auto& one = deliveries[i];
    if (seen(clock, one.agent) < one.epoch || (one.to_host && !is_host)) i++;
    else take(i);
  }
}

void launch(int agent, const std::string& operation, bool delivers = true) {
  join(clocks[agent], clocks[kHost]);
  if (clocks[agent].size() <= size_t(agent)) clocks[agent].resize(agent + 1, 0);
  clocks[agent][agent]++;
  num_operations++;
  if (delivers) deliver(clocks[agent]);
  if (tracing) trace.emplace_back(agent_names[agent], operation);
}

// The host may write pinned memory again once it knows that the device has read it.
void take_back() {
  for (size_t i = 0; i < lent.size();) {
    auto& one = lent[i];
    if (seen(clocks[kHost], one.agent) < one.epoch) { i++; continue; }
    if (memcmp(one.place, one.bytes.data(), one.bytes.size()) && races.size() < kMostReports)
      races.push_back("the host writes " + std::to_string(one.bytes.size()) + " pinned bytes that " + one.operation + " on " + agent_names[one.agent] +
                      " reads: the host waits for no event that " + agent_names[one.agent] + " recorded after it");
    lent.erase(lent.begin() + i);
  }
}

void host_waits(const Clock& clock, const std::string& why) {
  join(clocks[kHost], clock);
  deliver(clocks[kHost]);
  take_back();
  if (syncs.size() < 100000) syncs.push_back(label.empty() ? why : label + ": " + why);
}

Block* block_of(const void* address, uintptr_t* start) {
  auto found = blocks.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (found == blocks.begin()) return nullptr;
  --found;
  if (reinterpret_cast<uintptr_t>(address) >= found->first + found->second.bytes) return nullptr;
  *start = found->first;
  return &found->second;
}

void access(const at::Tensor& tensor, int agent, bool write, const std::string& operation) {
  if (!tensor.defined() || tensor.numel() == 0 || !tensor.storage().data()) return;
  uintptr_t start;
  Block* block = block_of(tensor.storage().data(), &start);
  if (!block) return;
  size_t extent = 1;
  for (int64_t d = 0; d < tensor.dim(); d++) extent += (tensor.size(d) - 1) * tensor.stride(d);
  size_t begin = reinterpret_cast<uintptr_t>(tensor.storage().data()) - start + tensor.storage_offset() * tensor.element_size();
  size_t end = begin + extent * tensor.element_size();
  auto& mine = clocks[agent];
  auto& old = block->accesses;
  for (auto& other : old) {
    if (other.end <= begin || end <= other.begin || !(write || other.write) || other.agent == agent) continue;
    if (seen(mine, other.agent) >= other.epoch) continue;
    if (races.size() < kMostReports) {
      std::ostringstream text;
      text << operation << " on " << agent_names[agent] << (write ? " writes " : " reads ") << (end - begin) << " bytes (" << c10::str(tensor.sizes()) << " "
           << c10::toString(tensor.scalar_type()) << ") that " << other.operation << " on " << agent_names[other.agent] << (other.write ? " writes" : " reads")
           << ": " << agent_names[agent] << " waits for no event that " << agent_names[other.agent] << " recorded after it";
      races.push_back(text.str());
    }
    other.epoch = 0;  // once is enough
  }
  old.erase(std::remove_if(old.begin(), old.end(), [&](const Access& o) {
    bool covered = begin <= o.begin && o.end <= end;
    return o.epoch == 0 || (covered && (write || (!o.write && o.agent == agent)) && (o.agent == agent || seen(mine, o.agent) >= o.epoch));
  }), old.end());
  old.push_back({agent, mine[agent], begin, end, write, operation});
}

// ---- memory: blocks are reused at once by the stream that allocated them, as a caching allocator does

void release(void* address) {
  std::lock_guard<std::recursive_mutex> guard(mutex);
  auto start = reinterpret_cast<uintptr_t>(address);
  auto found = blocks.find(start);
  if (found == blocks.end()) return;
  auto& block = found->second;
  bytes_now[block.device] -= block.bytes;
  if (late) memset(kernel_address(address), 0xff, block.bytes);
  deliveries.erase(std::remove_if(deliveries.begin(), deliveries.end(), [&](const Delivery& d) {
    char* p = kernel_address(address);
    return d.target >= p && d.target < p + block.bytes;
  }), deliveries.end());
  block.due.clear();
  for (int agent : block.recorded) block.due.emplace_back(agent, seen(clocks[agent], agent));
  block.recorded.clear();
  if (block.due.empty()) free_blocks[{block.device, block.agent, block.bytes}].push_back(start);
  else limbo.push_back(start);
}

void leave_limbo() {  // what the host knows to be over may be used again
  for (size_t i = 0; i < limbo.size();) {
    auto& block = blocks[limbo[i]];
    bool over = std::all_of(block.due.begin(), block.due.end(), [](auto& d) { return seen(clocks[kHost], d.first) >= d.second; });
    if (!over) { i++; continue; }
    free_blocks[{block.device, block.agent, block.bytes}].push_back(limbo[i]);
    limbo.erase(limbo.begin() + i);
  }
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t wanted) override {
    c10::Device device(kSim, current_device);
    if (wanted == 0) return {nullptr, nullptr, &release, device};
    std::lock_guard<std::recursive_mutex> guard(mutex);
    open_arena(current_device);
    size_t bytes = (wanted + kGranularity - 1) / kGranularity * kGranularity;
    int agent = agent_of(stream_of(current_device));
    leave_limbo();
    auto& pool = free_blocks[{current_device, agent, bytes}];
    uintptr_t start;
    if (!pool.empty()) {
      start = pool.back();
      pool.pop_back();
    } else {
      TORCH_CHECK(arena_used[current_device] + bytes <= kArenaBytes, "sim:", int(current_device), " is out of memory");
      start = reinterpret_cast<uintptr_t>(arena_device[current_device]) + arena_used[current_device];
      arena_used[current_device] += bytes;
      blocks[start] = Block{bytes, current_device, agent, {}, {}, {}};
    }
    if (late) memset(kernel_address(reinterpret_cast<void*>(start)), 0xff, bytes);
    bytes_now[current_device] += bytes;
    bytes_peak[current_device] = std::max(bytes_peak[current_device], bytes_now[current_device]);
    auto* address = reinterpret_cast<void*>(start);
    return {address, address, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t bytes) const override { memcpy(kernel_address(target), kernel_address(source), bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    uintptr_t start;
    Block* block = data.get() ? block_of(data.get(), &start) : nullptr;
    int agent = agent_of(stream);
    if (block && agent != block->agent) block->recorded.insert(agent);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& all = stats.allocated_bytes[0];
    all.current = bytes_now[device];
    all.peak = bytes_peak[device];
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { bytes_peak[device] = bytes_now[device]; }
} allocator;
REGISTER_ALLOCATOR(kSim, &allocator);

std::map<void*, size_t> pinned;

bool is_pinned(const void* p) {
  auto found = pinned.upper_bound(const_cast<void*>(p));
  return found != pinned.begin() && static_cast<const char*>(p) < static_cast<char*>((--found)->first) + found->second;
}

struct PinnedAllocator final : c10::Allocator {
  static void free_pinned(void* p) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    auto found = pinned.find(p);
    auto* begin = static_cast<char*>(p);
    auto* end = begin + found->second;
    pinned.erase(found);
    // Nobody can write it any more; the next owner waits for the device.
    lent.erase(std::remove_if(lent.begin(), lent.end(), [&](const Lent& l) { return l.place >= begin && l.place < end; }), lent.end());
    deliveries.erase(std::remove_if(deliveries.begin(), deliveries.end(), [&](const Delivery& d) { return d.target >= begin && d.target < end; }), deliveries.end());
    std::free(p);
  }
  c10::DataPtr allocate(size_t bytes) override {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    size_t whole = (std::max<size_t>(bytes, 1) + 63) / 64 * 64;
    void* p = std::aligned_alloc(64, whole);
    pinned[p] = whole;
    return {p, p, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* target, const void* source, size_t bytes) const override { memcpy(target, source, bytes); }
} pinned_allocator;

// ---- devices, streams, events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Lock = std::lock_guard<std::recursive_mutex>;
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override { auto old = getDevice(); setDevice(device); return old; }
  c10::Device getDevice() const override { return c10::Device(kSim, current_device); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kNumDevices, "there is no device ", device, "; the last is sim:", kNumDevices - 1);
    if (device.index() >= 0) current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { if (device.index() >= 0) current_device = device.index(); }
  c10::Stream getStream(c10::Device device) const override { return stream_of(device.index() < 0 ? current_device : device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device.index() < 0 ? current_device : device.index()), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    Lock guard(mutex);
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device.index() < 0 ? current_device : device.index()), next_stream_id++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    static std::atomic<int> turn{0};
    static std::map<std::pair<int, int>, c10::Stream> pool;
    Lock guard(mutex);
    std::pair<int, int> key(device.index() < 0 ? current_device : device.index(), turn++ % 32);
    auto found = pool.find(key);
    if (found == pool.end()) found = pool.emplace(key, getNewStream(c10::Device(kSim, key.first), 0)).first;
    return found->second;
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto old = stream_of(stream.device_index());
    current_stream[stream.device_index()] = stream.id();
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(uintptr_t(stream.id())); }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock guard(mutex);
    if (!*event) *event = new Event;
    int agent = agent_of(stream);
    join(clocks[agent], clocks[kHost]);
    static_cast<Event*>(*event)->clock = clocks[agent];
    static_cast<Event*>(*event)->agent = agent;
    static_cast<Event*>(*event)->time = num_operations;
  }
  void block(void* event, const c10::Stream& stream) const override {
    Lock guard(mutex);
    if (!event) return;
    int agent = agent_of(stream);
    auto* one = static_cast<Event*>(event);
    if (tracing && one->agent >= 0 && one->agent != agent && seen(clocks[agent], one->agent) < seen(one->clock, one->agent))
      trace.emplace_back(agent_names[agent], "waits for " + agent_names[one->agent]);
    join(clocks[agent], one->clock);
    deliver(one->clock);
  }
  // Nothing is over before somebody waited for it: asking is no waiting.
  bool queryEvent(void* event) const override {
    Lock guard(mutex);
    auto* one = static_cast<Event*>(event);
    return !one || one->agent < 0 || seen(clocks[kHost], one->agent) >= seen(one->clock, one->agent);
  }
  bool queryStream(const c10::Stream& stream) const override {
    Lock guard(mutex);
    int agent = agent_of(stream);
    return seen(clocks[kHost], agent) >= seen(clocks[agent], agent);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void synchronizeStream(const c10::Stream& stream) const override {
    Lock guard(mutex);
    host_waits(clocks[agent_of(stream)], "synchronises a stream");
  }
  void synchronizeEvent(void* event) const override {
    Lock guard(mutex);
    if (event) host_waits(static_cast<Event*>(event)->clock, "synchronises an event");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Lock guard(mutex);
    Clock all;
    for (auto& one : agents)
      if (one.first.first == device) join(all, clocks[one.second]);
    host_waits(all, "synchronises a device");
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override { allocator.recordStream(data, stream); }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return double(static_cast<Event*>(to)->time) - double(static_cast<Event*>(from)->time);
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice(c10::Device(kSim, device)); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { auto old = current_device; setCurrentDevice(device); return old; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* p) const override { std::lock_guard<std::recursive_mutex> guard(mutex); return is_pinned(p); }
  at::Device getDeviceFromPtr(void* p) const override {
    for (int d = 0; d < kNumDevices; d++)
      if (arena_device[d] && p >= arena_device[d] && p < arena_device[d] + kArenaBytes) return at::Device(kSim, d);
    return at::Device(at::kCPU);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto fresh = allocator.allocate(bytes);
    if (auto kept = std::min(bytes, storage.nbytes())) allocator.copy_data(fresh.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// ---- kernels: the CPU's, on the kernels' mapping of device memory, with roundings of our own

at::Tensor host_view(const at::Tensor& tensor) {
  c10::Storage storage(c10::Storage::use_byte_size_t{}, tensor.storage().nbytes(), at::DataPtr(kernel_address(tensor.storage().data()), at::kCPU), c10::GetAllocator(c10::kCPU), true);
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

at::Tensor to_device(const at::Tensor& computed, c10::Device device) {
  c10::DeviceGuard guard(device);
  at::Tensor fresh = at::detail::empty_strided_generic(computed.sizes(), computed.strides(), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), computed.scalar_type());
  host_view(fresh).copy_(computed);
  return fresh;
}

uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull + rounding_seed;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// Rounds double results to `type`: exact ones stay, of the others about half go to the neighbour on the other side.
at::Tensor rounded(const at::Tensor& exact, at::ScalarType type) {
  auto near = exact.to(type).to(at::kDouble).contiguous();
  auto wide = exact.contiguous();
  auto result = exact.to(type).contiguous();
  auto away = at::nextafter(result.to(at::kFloat), at::where(wide > near, INFINITY, -INFINITY).to(at::kFloat));
  if (type != at::kFloat) return exact.to(type);  // half precisions: as the CPU rounds
  auto* w = wide.const_data_ptr<double>();
  auto* n = near.const_data_ptr<double>();
  auto* r = result.mutable_data_ptr<float>();
  auto* a = away.const_data_ptr<float>();
  for (int64_t i = 0; i < result.numel(); i++) {
    uint64_t bits;
    memcpy(&bits, w + i, sizeof bits);
    if (w[i] != n[i] && std::isfinite(n[i]) && (mixed(bits) & 1)) r[i] = a[i];
  }
  return at::empty_strided(exact.sizes(), exact.strides(), exact.options().dtype(type)).copy_(result);
}

const std::unordered_set<std::string> kRounded{
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::sum", "aten::mean", "aten::exp", "aten::tanh",
    "aten::sigmoid", "aten::gelu", "aten::_softmax", "aten::_log_softmax", "aten::convolution_overrideable"};
const std::unordered_set<std::string> kAsksForData{
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::bincount", "aten::_local_scalar_dense", "aten::equal"};

struct Call {
  int device = -1;
  bool widens = false, widened = false;
  std::vector<std::pair<at::Tensor, bool>> touched;                  // and whether it is written
  std::vector<std::pair<at::Tensor, at::Tensor>> views;              // original, view
  std::vector<std::pair<at::Tensor, at::Tensor>> written;            // original, view

  at::Tensor lowered(const at::Tensor& tensor, bool writes) {
    if (!tensor.defined() || tensor.device().type() != kSim) return tensor;
    TORCH_CHECK(tensor.layout() == at::kStrided, "the simulated device has no sparse tensors");
    if (device < 0) device = tensor.device().index();
    TORCH_CHECK(device == tensor.device().index() || tensor.dim() == 0, "expected all tensors on sim:", device, ", one is on ", tensor.device());
    touched.emplace_back(tensor, writes);
    auto view = host_view(tensor);
    views.emplace_back(tensor, view);
    if (writes) written.emplace_back(tensor, view);
    if (widens && !writes && tensor.scalar_type() == at::kFloat) { widened = true; return view.to(at::kDouble); }
    return view;
  }
  at::Tensor raised(const at::Tensor& computed) {
    if (!computed.defined() || computed.device().type() == kSim) return computed;
    for (auto& [original, view] : views)
      if (view.is_same(computed)) return original;
    auto* data = computed.storage().data();
    for (auto& [original, view] : views) {
      if (!data || view.storage().data() != data || original.storage().nbytes() == 0) continue;
      at::Tensor alias = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(original.storage()), original.key_set(), computed.dtype());
      alias.unsafeGetTensorImpl()->set_sizes_and_strides(computed.sizes(), computed.strides(), computed.storage_offset());
      return alias;
    }
    auto result = widened && computed.scalar_type() == at::kDouble ? rounded(computed, at::kFloat) : computed;
    auto fresh = to_device(result, c10::Device(kSim, device < 0 ? current_device : device));
    touched.emplace_back(fresh, true);
    return fresh;
  }
};

void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto name = schema.name();
  Call call;
  call.widens = rounding_seed != 0 && kRounded.count(name) && schema.overload_name().find("out") == std::string::npos;
  size_t num_arguments = schema.arguments().size(), first = stack->size() - num_arguments;
  for (size_t i = 0; i < num_arguments; i++) {
    auto& value = (*stack)[first + i];
    auto* alias = schema.arguments()[i].alias_info();
    bool writes = alias && alias->isWrite();
    if (value.isTensor()) value = call.lowered(value.toTensor(), writes);
    else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& one : value.toTensorVector()) list.push_back(call.lowered(one, writes));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& one : value.toOptionalTensorVector()) list.push_back(one ? std::optional<at::Tensor>(call.lowered(*one, writes)) : one);
      value = list;
    } else if (value.isDevice()) {
      if (call.device < 0 && value.toDevice().type() == kSim && value.toDevice().has_index()) call.device = value.toDevice().index();
      value = c10::Device(c10::kCPU);
    }
  }
  if (call.device < 0) call.device = current_device;
  std::lock_guard<std::recursive_mutex> guard(mutex);
  int agent = agent_of(stream_of(call.device));
  auto operation = label.empty() ? name : label + ": " + name;
  launch(agent, operation);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (auto& [original, view] : call.written) {
    if (view.storage().data() == kernel_address(original.storage().data())) {
      original.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
      continue;
    }
    original.resize_(view.sizes());  // an out= variant that chose its shape
    host_view(original).copy_(view);
  }
  bool asks = kAsksForData.count(name) > 0;
  size_t num_returns = schema.returns().size();
  for (size_t i = stack->size() - num_returns; i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (value.isTensor()) value = call.raised(value.toTensor());
    else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& one : value.toTensorVector()) list.push_back(call.raised(one));
      value = list;
    } else asks = true;
  }
  for (auto& [tensor, writes] : call.touched) access(tensor, agent, writes, operation);
  if (asks) host_waits(clocks[agent], "waits for " + name);
}

at::Tensor empty_memory_format(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(at::Device(kSim, current_device)));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(at::Device(kSim, current_device)));
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  std::lock_guard<std::recursive_mutex> guard(mutex);
  bool from = source.device().type() == kSim, to = target.device().type() == kSim;
  int agent = agent_of(stream_of(from ? source.device().index() : target.device().index()));
  auto what = from && to ? "a copy" : from ? "a copy to the host" : "a copy from the host";
  auto operation = label.empty() ? what : label + ": " + what;
  int other = agent;
  if (from && to && source.device() != target.device()) {  // ordered on both devices
    other = agent_of(stream_of(target.device().index()));
    join(clocks[agent], clocks[other]);
  }
  launch(agent, operation);
  auto target_view = to ? host_view(target) : target;
  target_view.copy_(from ? host_view(source) : source);
  if (from) access(source, agent, false, operation);
  if (to) access(target, agent, true, operation);
  if (other != agent) join(clocks[other], clocks[agent]);
  if (!(from && to)) {
    const auto& host = from ? target : source;
    bool in_flight = non_blocking && host.numel() && host.is_pinned();
    if (!(in_flight || (non_blocking && (host.numel() == 0 || (to && host.dim() == 0))))) host_waits(clocks[agent], what);
    if (in_flight && host.is_contiguous()) {
      auto* place = static_cast<char*>(host.data_ptr());
      std::vector<char> bytes(place, place + host.nbytes());
      if (to) lent.push_back({agent, seen(clocks[agent], agent), place, std::move(bytes), operation});
      else if (late) {
        deliveries.push_back({agent, seen(clocks[agent], agent), place, std::move(bytes), true});
        memset(place, 0xff, host.nbytes());
      }
    }
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef wanted, std::optional<at::MemoryFormat> format) {
  auto size = C10_AS_INTARRAYREF_SLOW(wanted);
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  size_t bytes = (impl->numel() + impl->storage_offset()) * self.element_size();
  if (impl->numel() && self.storage().nbytes() < bytes) Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto strides = C10_AS_INTARRAYREF_SLOW(stride);
  if (sizes.size() == strides.size()) impl->set_sizes_and_strides(sizes, strides, offset.expect_int());
  else { impl->set_sizes_contiguous(sizes); impl->set_storage_offset(offset.expect_int()); }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage source) {
  c10::SymInt size(int64_t(source.nbytes() / self.element_size()));
  return set_storage(self, std::move(source), 0, c10::SymIntArrayRef(&size, 1), {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

void record_stream(at::Tensor& self, c10::Stream stream) { allocator.recordStream(self.storage().data_ptr(), stream); }

using Layers = std::vector<at::Tensor>;

// Runs a function of tensors as one kernel of this device.
Layers composed(const std::string& name, const Layers& inputs, const std::function<Layers(const Layers&)>& function) {
  std::lock_guard<std::recursive_mutex> guard(mutex);
  Call call;
  call.widens = rounding_seed != 0;
  Layers views;
  for (const auto& input : inputs) views.push_back(call.lowered(input, false));
  int agent = agent_of(stream_of(call.device));
  launch(agent, name);
  Layers results;
  {
    c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset);
    for (const auto& result : function(views)) results.push_back(call.raised(result));
  }
  for (auto& [tensor, writes] : call.touched) access(tensor, agent, writes, name);
  return results;
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  return composed("convolution", {input, weight, bias.value_or(at::Tensor())}, [&](const Layers& t) -> Layers {
    return {at::convolution_symint(t[0], t[1], t[2].defined() ? std::optional<at::Tensor>(t[2]) : std::nullopt, stride, padding, dilation, transposed, output_padding, groups)};
  })[0];
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups, std::array<bool, 3> mask) {
  c10::SymInt channels = transposed ? weight.sym_size(1) * groups : weight.sym_size(0);
  auto r = composed("convolution_backward", {gradient, input, weight}, [&](const Layers& t) -> Layers {
    auto [a, b, c] = at::convolution_backward_symint(t[0], t[1], t[2], c10::SymIntArrayRef(&channels, 1), stride, padding, dilation, transposed, output_padding, groups, mask);
    return {a, b, c};
  });
  return {r[0], r[1], r[2]};
}

// The pieces of which torch makes its SyncBatchNorm on accelerators; statistics are per feature, dimension 1.
at::Tensor per_feature(const at::Tensor& vector, const at::Tensor& rows) {
  std::vector<int64_t> shape(rows.dim(), 1);
  shape[1] = rows.size(1);
  return vector.view(shape);
}

std::vector<int64_t> all_but_features(const at::Tensor& rows) {
  std::vector<int64_t> dims{0};
  for (int64_t d = 2; d < rows.dim(); d++) dims.push_back(d);
  return dims;
}

std::tuple<at::Tensor, at::Tensor> batch_norm_stats(const at::Tensor& input, double eps) {
  auto r = composed("batch_norm_stats", {input}, [&](const Layers& t) -> Layers {
    auto dims = all_but_features(t[0]);
    return {t[0].mean(dims), (t[0].var(dims, false) + eps).rsqrt()};
  });
  return {r[0], r[1]};
}

std::tuple<at::Tensor, at::Tensor> batch_norm_gather_stats_with_counts(const at::Tensor& input, const at::Tensor& mean, const at::Tensor& invstd, const std::optional<at::Tensor>& running_mean, const std::optional<at::Tensor>& running_var, double momentum, double eps, const at::Tensor& counts) {
  auto r = composed("batch_norm_gather_stats_with_counts", {mean, invstd, counts, running_mean.value_or(at::Tensor()), running_var.value_or(at::Tensor())}, [&](const Layers& t) -> Layers {
    auto n = t[2].view({-1, 1});
    auto total = n.sum();
    auto m = (t[0] * n).sum(0) / total;
    auto var = ((t[1].pow(-2) - eps + (t[0] - m).square()) * n).sum(0) / total;
    auto kept_mean = t[3].defined() ? t[3] * (1 - momentum) + m * momentum : at::Tensor();
    auto kept_var = t[4].defined() ? t[4] * (1 - momentum) + var * total / (total - 1) * momentum : at::Tensor();
    return {m, (var + eps).rsqrt(), kept_mean, kept_var};
  });
  if (running_mean && running_mean->defined()) running_mean->copy_(r[2]);
  if (running_var && running_var->defined()) running_var->copy_(r[3]);
  return {r[0], r[1]};
}

at::Tensor batch_norm_elemt(const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias, const at::Tensor& mean, const at::Tensor& invstd, double) {
  return composed("batch_norm_elemt", {input, weight.value_or(at::Tensor()), bias.value_or(at::Tensor()), mean, invstd}, [&](const Layers& t) -> Layers {
    auto normal = (t[0] - per_feature(t[3], t[0])) * per_feature(t[4], t[0]);
    if (t[1].defined()) normal = normal * per_feature(t[1], t[0]);
    if (t[2].defined()) normal = normal + per_feature(t[2], t[0]);
    return {normal};
  })[0];
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> batch_norm_backward_reduce(const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& mean, const at::Tensor& invstd, const std::optional<at::Tensor>&, bool, bool, bool) {
  auto r = composed("batch_norm_backward_reduce", {gradient, input, mean, invstd}, [&](const Layers& t) -> Layers {
    auto dims = all_but_features(t[0]);
    auto sum = t[0].sum(dims), with_deviations = (t[0] * (t[1] - per_feature(t[2], t[1]))).sum(dims);
    return {sum, with_deviations, with_deviations * t[3], sum.clone()};
  });
  return {r[0], r[1], r[2], r[3]};
}

at::Tensor batch_norm_backward_elemt(const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& mean, const at::Tensor& invstd, const std::optional<at::Tensor>& weight, const at::Tensor& sum, const at::Tensor& with_deviations, const at::Tensor& counts) {
  return composed("batch_norm_backward_elemt", {gradient, input, mean, invstd, weight.value_or(at::Tensor()), sum, with_deviations, counts}, [&](const Layers& t) -> Layers {
    auto total = t[7].sum();
    auto deviations = t[1] - per_feature(t[2], t[1]);
    auto through = per_feature(t[5] / total, t[1]) + deviations * per_feature(t[6] / total * t[3].square(), t[1]);
    auto factor = t[4].defined() ? t[3] * t[4] : t[3];
    return {(t[0] - through) * per_feature(factor, t[1])};
  })[0];
}

// torch computes LSTM cells of accelerators by a kernel of one piece.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& cx, const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  auto r = composed("lstm_cell", {input_gates, hidden_gates, cx, input_bias.value_or(at::Tensor()), hidden_bias.value_or(at::Tensor())}, [&](const Layers& t) -> Layers {
    auto sum = t[0] + t[1];
    if (t[3].defined()) sum = sum + t[3];
    if (t[4].defined()) sum = sum + t[4];
    auto part = sum.chunk(4, 1);
    auto in = part[0].sigmoid(), forget = part[1].sigmoid(), cell = part[2].tanh(), out = part[3].sigmoid();
    auto cy = forget * t[2] + in * cell;
    return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
  });
  return {r[0], r[1], r[2]};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(const std::optional<at::Tensor>& grad_hy, const std::optional<at::Tensor>& grad_cy, const at::Tensor& cx, const at::Tensor& cy, const at::Tensor& workspace, bool has_bias) {
  auto r = composed("lstm_cell_backward", {grad_hy.value_or(at::Tensor()), grad_cy.value_or(at::Tensor()), cx, cy, workspace}, [&](const Layers& t) -> Layers {
    auto part = t[4].chunk(4, 1);
    auto in = part[0], forget = part[1], cell = part[2], out = part[3];
    auto bent = t[3].tanh();
    auto down = t[0].defined() ? t[0] : at::zeros_like(t[3]);
    auto through = down * out * (1 - bent * bent);
    if (t[1].defined()) through = through + t[1];
    auto gates = at::cat({through * cell * in * (1 - in), through * t[2] * forget * (1 - forget), through * in * (1 - cell * cell), down * bent * out * (1 - out)}, 1);
    return {gates, through * forget, has_bias ? gates.sum(0) : at::Tensor()};
  });
  return {r[0], r[1], r[2]};
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }

// A copy reads conjugated and negated tensors as they are; torch's way round would clone them, by a copy. Their memory is
// what a stream is recorded for; torch's way round would record a clone, and free it twice.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
  m.impl("record_stream", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
  m.impl("record_stream", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &view);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("unfold", &at::native::unfold);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("record_stream", &record_stream);
  m.impl("convolution_overrideable", &convolution);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("batch_norm_stats", &batch_norm_stats);
  m.impl("batch_norm_gather_stats_with_counts", &batch_norm_gather_stats_with_counts);
  m.impl("batch_norm_elemt", &batch_norm_elemt);
  m.impl("batch_norm_backward_reduce", &batch_norm_backward_reduce);
  m.impl("batch_norm_backward_elemt", &batch_norm_backward_elemt);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using Lock = std::lock_guard<std::recursive_mutex>;
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("configure", [](bool is_late, uint64_t seed) { Lock guard(mutex); late = is_late; rounding_seed = seed; });
  m.def("current_device", [] { return int(current_device); });
  m.def("set_device", [](int device) { Guard().setDevice(c10::Device(kSim, device)); });
  m.def("device_count", [] { return kNumDevices; });
  m.def("host_view", &host_view);
  m.def("set_label", [](const std::string& text) { auto old = label; label = text; return old; });
  m.def("launch", [](const std::string& operation, const Layers& reads, const Layers& writes) {
    Lock guard(mutex);
    const auto& any = reads.empty() ? writes : reads;
    int agent = agent_of(stream_of(any.empty() ? int(current_device) : int(any[0].device().index())));
    launch(agent, operation, false);  // behind other collectives of the stream, and the host does not wait for them
    for (const auto& one : reads) access(one, agent, false, operation);
    for (const auto& one : writes) access(one, agent, true, operation);
  });
  // What a collective that was launched last on the current stream brings: `result`, on the CPU, once `work` is over.
  m.def("will_arrive", [](const at::Tensor& target, const at::Tensor& result, const c10::intrusive_ptr<c10d::Work>& work) {
    Lock guard(mutex);
    int agent = agent_of(stream_of(target.device().index()));
    char* place = kernel_address(target.storage().data());
    if (late && target.is_contiguous()) memset(kernel_address(target.data_ptr()), 0xff, target.nbytes());
    deliveries.push_back({agent, seen(clocks[agent], agent), place, {}, false, work, host_view(target), result});
  });
  m.def("arrive_in", [](const at::Tensor& tensor) {  // what earlier collectives bring, because another one sends it on
    Lock guard(mutex);
    char* place = kernel_address(tensor.storage().data());
    for (size_t i = 0; i < deliveries.size();)
      if (deliveries[i].work && deliveries[i].target == place) take(i);
      else i++;
  });
  m.def("clock", [] { Lock guard(mutex); return clocks[agent_of(stream_of(int(current_device)))]; });  // of the current stream
  m.def("host_has_seen", [](const Clock& clock) {  // who asks and is told that something is over has not waited for it
    Lock guard(mutex);
    join(clocks[kHost], clock);
    deliver(clocks[kHost]);
    take_back();
  });
  m.def("take_races", [] { Lock guard(mutex); auto taken = races; races.clear(); return taken; });
  m.def("take_syncs", [] { Lock guard(mutex); auto taken = syncs; syncs.clear(); return taken; });
  m.def("start_trace", [] { Lock guard(mutex); trace.clear(); tracing = true; });
  m.def("take_trace", [] { Lock guard(mutex); tracing = false; std::vector<std::pair<std::string, std::string>> taken(trace.begin(), trace.end()); trace.clear(); return taken; });
  m.def("settle", [] {  // as after the end of everything: what follows is ordered after what was
    Lock guard(mutex);
    Clock all;
    for (auto& one : clocks) join(all, one);
    for (auto& one : clocks) join(one, all);
    // Collectives that other ranks never took part in bring nothing.
    deliveries.erase(std::remove_if(deliveries.begin(), deliveries.end(), [](const Delivery& d) { return d.work && !d.work->isCompleted(); }), deliveries.end());
    deliver(clocks[kHost]);
    take_back();
    for (auto& [start, block] : blocks) block.accesses.clear();
  });
}
