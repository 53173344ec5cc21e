// Times products of few rows, and whole layers, of Llama 3.2 1B and 3B by the library's CUDA C++ alone,
// in CUDA graphs, and compares each product with a plain loop. A line of JSON for each; see tuning.py.
//
// TILES and DEPTH are Bfloat16Format's kTiles and kDepth.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "multiply.cuh"
#include "operands.cuh"

namespace {

using jspec::Product;

struct Format : jspec::Bfloat16Format {
  static constexpr int kTiles = TILES, kDepth = DEPTH;
};

constexpr size_t kWeightBytes = size_t(6) << 30, kColdBytes = 600 << 20;
constexpr int kRepeats = 9, kWarmUp = 2, kSlots = 256, kBlockSize = 64;
constexpr float kEpsilon = 1e-5f;

cudaStream_t stream;
double bytes_a_microsecond;  // that a loop reads

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  printf("{\"error\": \"%s: %s\"}\n", what, cudaGetErrorString(error));
  exit(1);
}

template <class T>
T* Allocate(size_t count) {
  void* memory = nullptr;
  Check(cudaMalloc(&memory, count * sizeof(T)), "memory");
  Check(cudaMemset(memory, 0, count * sizeof(T)), "memory");
  return static_cast<T*>(memory);
}

// Numbers between -0.025 and 0.025 that look random.
__global__ void Fill(uint16_t* numbers, float* floats, size_t count, uint32_t seed) {
  const size_t stride = size_t(gridDim.x) * blockDim.x;
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += stride) {
    uint32_t hash = uint32_t(i) * 2654435761u + seed;
    hash = (hash ^ hash >> 15) * 2246822519u;
    const float number = (float((hash ^ hash >> 13) & 0xffff) / 65536 - 0.5f) * 0.05f;
    if (numbers) numbers[i] = jspec::ToBfloat16(number);
    if (floats) floats[i] = number;
  }
}

__global__ void Read(const uint4* memory, size_t count, uint32_t* result) {
  const size_t stride = size_t(gridDim.x) * blockDim.x;
  uint32_t sum = 0;
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i + 7 * stride < count;
       i += 8 * stride) {
    uint4 loaded[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) loaded[k] = __ldcs(memory + i + k * stride);
#pragma unroll
    for (const uint4& four : loaded) sum += four.x ^ four.y ^ four.z ^ four.w;
  }
  if (sum == 0x12345) *result = sum;
}

// The product by a loop in float32, a thread for each result.
__global__ void Multiply(const Product product, float* results) {
  const int output = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
  if (output >= product.num_outputs) return;
  const auto dot = [&](int kernel_output) {
    float sum = 0, squares = 0;
    for (int i = 0; i < product.num_inputs; ++i) {
      float x = jspec::LoadFloat(product.rows, int64_t(row) * product.num_inputs + i);
      squares = fmaf(x, x, squares);
      if (product.norm.data) x *= jspec::LoadFloat(product.norm, i);
      const int64_t place = int64_t(kernel_output) * product.num_inputs + i;
      const float weight = jspec::LoadFloat({product.weights, true}, place);
      sum = fmaf(jspec::FloatOf(uint32_t(jspec::ToBfloat16(x)) << 16), weight, sum);
    }
    return product.norm.data ? sum * rsqrtf(squares / product.num_inputs + product.epsilon) : sum;
  };
  float result = dot(output);
  if (product.activation != jspec::Activation::kNone) {
    result = jspec::Activate(result, product.activation) * dot(output + product.num_outputs);
  }
  results[int64_t(row) * product.num_outputs + output] = result;
}

// Returns the microseconds of a graph of what `launch` launches, the median of some runs.
template <class Launch>
double Time(Launch launch) {
  cudaGraph_t graph;
  cudaGraphExec_t program;
  cudaEvent_t begin, end;
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  launch();
  Check(cudaStreamEndCapture(stream, &graph), "capture");
  Check(cudaGraphInstantiate(&program, graph, 0), "graph");
  Check(cudaEventCreate(&begin), "event");
  Check(cudaEventCreate(&end), "event");
  std::vector<float> times;
  for (int i = 0; i < kRepeats + kWarmUp; ++i) {
    Check(cudaEventRecord(begin, stream), "event");
    Check(cudaGraphLaunch(program, stream), "run");
    Check(cudaEventRecord(end, stream), "event");
    Check(cudaStreamSynchronize(stream), "run");
    float milliseconds;
    Check(cudaEventElapsedTime(&milliseconds, begin, end), "event");
    if (i >= kWarmUp) times.push_back(1e3f * milliseconds);
  }
  std::sort(times.begin(), times.end());
  Check(cudaGraphExecDestroy(program), "graph");
  Check(cudaGraphDestroy(graph), "graph");
  return times[times.size() / 2];
}

struct Shape {
  const char* name;
  int outputs, inputs;
  bool is_gated, has_norm;
};

struct Model {
  const char* name;
  int size, hidden, heads, kv_heads, head_size, layers;

  int qkv() const { return (heads + 2 * kv_heads) * head_size; }
  std::vector<Shape> shapes() const {
    return {{"gate, up", 2 * hidden, size, true, true}, {"down", size, hidden, false, false},
            {"q, k, v", qkv(), size, false, true},      {"output", size, heads * head_size, false, false},
            {"head", 128256, size, false, false}};
  }
};

struct Memory {
  uint16_t* weights = Allocate<uint16_t>(kWeightBytes / 2);
  float* rows = Allocate<float>(1 << 20);
  float* norm = Allocate<float>(1 << 16);
  float* results = Allocate<float>(1 << 22);
  float* expected = Allocate<float>(1 << 22);
  float* qkv = Allocate<float>(1 << 20);
  float* middle = Allocate<float>(1 << 20);
  float* parts = Allocate<float>(1 << 24);
  float* angles = Allocate<float>(1 << 20);
  uint16_t* mixed = Allocate<uint16_t>(1 << 20);
  uint16_t* gated = Allocate<uint16_t>(1 << 20);
  uint16_t* cache = Allocate<uint16_t>(size_t(1) << 28);
  float2* sums = Allocate<float2>(1 << 20);
  int* start = Allocate<int>(16);
  uint8_t* visible = Allocate<uint8_t>(1 << 20);
};

Product ProductOf(const Memory& memory, const Shape& shape, int num_rows, size_t place) {
  Product product;
  product.rows = {memory.rows, false};
  product.weights = memory.weights + place;
  if (shape.has_norm) product.norm = {memory.norm, false};
  product.epsilon = kEpsilon;
  product.num_rows = num_rows;
  product.num_inputs = shape.inputs;
  product.num_outputs = shape.is_gated ? shape.outputs / 2 : shape.outputs;
  if (shape.is_gated) product.activation = jspec::Activation::kSilu;
  product.result = memory.results;
  return product;
}

void Launch(const Product& product) {
  Check(jspec::LaunchFormat<Format>(stream, product), "a product");
}

// Returns the largest error of a product, as a share of the largest result.
double ErrorOf(const Memory& memory, const Product& product) {
  const size_t count = size_t(product.num_rows) * product.num_outputs;
  Check(cudaMemset(memory.results, 0xff, count * 4), "memory");
  Launch(product);
  const dim3 grid((product.num_outputs + 255) / 256, product.num_rows);
  Multiply<<<grid, 256, 0, stream>>>(product, memory.expected);
  std::vector<float> results(count), expected(count);
  Check(cudaStreamSynchronize(stream), "a product");
  Check(cudaMemcpy(results.data(), memory.results, count * 4, cudaMemcpyDeviceToHost), "copy");
  Check(cudaMemcpy(expected.data(), memory.expected, count * 4, cudaMemcpyDeviceToHost), "copy");
  double error = 0, largest = 0;
  for (size_t i = 0; i < count; ++i) {
    const double distance = std::fabs(double(results[i]) - expected[i]);
    error = distance <= error ? error : distance;  // NaN stays
    largest = std::max(largest, std::fabs(double(expected[i])));
  }
  return error == error ? error / largest : 1e30;  // JSON has no NaN
}

void TimeProducts(const Memory& memory, const Model& model, int num_rows) {
  for (const Shape& shape : model.shapes()) {
    const size_t numbers = size_t(shape.outputs) * shape.inputs;
    const int count = int(std::min(size_t(16), std::max(size_t(2), kColdBytes / (2 * numbers))));
    const double error = ErrorOf(memory, ProductOf(memory, shape, num_rows, numbers));
    const double time = Time([&] {
      for (int i = 0; i < count; ++i) {
        Product product = ProductOf(memory, shape, num_rows, i * numbers);
        product.overlaps = i > 0;
        Launch(product);
      }
    }) / count;
    printf("{\"model\": \"%s\", \"product\": \"%s\", \"tiles\": %d, \"depth\": %d, \"rows\": %d, "
           "\"error\": %.2g, \"microseconds\": %.2f, \"share_of_bandwidth\": %.3f}\n",
           model.name, shape.name, TILES, DEPTH, num_rows, error, time,
           2 * numbers / time / bytes_a_microsecond);
  }
}

jspec::AttentionCall AttentionOf(const Memory& memory, const Model& model, int layer, int tokens) {
  jspec::AttentionCall call = {};
  call.b = 1, call.t = tokens, call.k = model.kv_heads, call.g = model.heads / model.kv_heads;
  call.h = model.head_size, call.s = call.page = kSlots, call.num_splits = kSlots / kBlockSize;
  call.qkv = memory.qkv, call.cos = call.sin = memory.angles;
  call.start = memory.start, call.visible = memory.visible;
  call.epsilon = kEpsilon, call.scale = 0.125f;
  const size_t numbers = size_t(model.kv_heads) * kSlots * model.head_size;
  call.keys = memory.cache + 2 * layer * numbers, call.values = call.keys + numbers;
  call.parts = memory.parts, call.sums = memory.sums, call.mixed = memory.mixed;
  return call;
}

// Launches all layers as cuda/layer.cu does; the last kernel of one overlaps with the next one, too.
void LaunchLayers(const Memory& memory, const Model& model, int tokens, bool overlaps) {
  const std::vector<Shape> shapes = model.shapes();
  size_t place = 0;
  const auto multiply = [&](const Shape& shape, jspec::Floats rows, float* floats, uint16_t* pairs,
                            const float* residual, bool is_first) {
    Product product = ProductOf(memory, shape, tokens, place);
    place += size_t(shape.outputs) * shape.inputs;
    product.rows = rows, product.residual = residual;
    product.result = floats ? static_cast<void*>(floats) : pairs;
    product.has_bfloat16_result = pairs != nullptr;
    product.overlaps = overlaps && !is_first;
    Launch(product);
  };
  for (int layer = 0; layer < model.layers; ++layer) {
    multiply(shapes[2], {memory.rows, false}, memory.qkv, nullptr, nullptr, layer == 0);
    const auto attention = AttentionOf(memory, model, layer, tokens);
    Check(jspec::LaunchAttention(stream, attention, overlaps, overlaps), "attention");
    multiply(shapes[3], {memory.mixed, true}, memory.middle, nullptr, memory.rows, false);
    multiply(shapes[0], {memory.middle, false}, nullptr, memory.gated, nullptr, false);
    multiply(shapes[1], {memory.gated, true}, memory.rows, nullptr, memory.middle, false);
  }
}

void TimeLayers(const Memory& memory, const Model& model, int tokens, bool overlaps) {
  double numbers = 0;
  for (int i = 0; i < 4; ++i) numbers += double(model.shapes()[i].outputs) * model.shapes()[i].inputs;
  const double time =
      Time([&] { LaunchLayers(memory, model, tokens, overlaps); }) / model.layers;
  printf("{\"model\": \"%s\", \"layers\": %d, \"tiles\": %d, \"depth\": %d, \"tokens\": %d, "
         "\"slots\": %d, \"overlaps\": %s, \"microseconds\": %.2f, \"share_of_bandwidth\": %.3f}\n",
         model.name, model.layers, TILES, DEPTH, tokens, kSlots, overlaps ? "true" : "false", time,
         2 * numbers / time / bytes_a_microsecond);
}

}  // namespace

int main() {
  Check(cudaStreamCreate(&stream), "a stream");
  const Memory memory;
  Fill<<<1024, 256>>>(memory.weights, nullptr, kWeightBytes / 2, 1);
  Fill<<<64, 256>>>(nullptr, memory.rows, 1 << 20, 2);
  Fill<<<64, 256>>>(nullptr, memory.norm, 1 << 16, 3);
  const int start = kSlots - kBlockSize;
  Check(cudaMemcpy(memory.start, &start, sizeof(start), cudaMemcpyHostToDevice), "copy");
  Check(cudaMemset(memory.visible, 1, 1 << 20), "memory");
  Check(cudaDeviceSynchronize(), "numbers");
  for (unsigned blocks : {132, 264, 528, 1056}) {
    const double time = Time([&] {
      Read<<<blocks, 512, 0, stream>>>(reinterpret_cast<uint4*>(memory.weights), kWeightBytes / 48,
                                       reinterpret_cast<uint32_t*>(memory.results));
    });
    bytes_a_microsecond = std::max(bytes_a_microsecond, kWeightBytes / 3 / time);
  }
  cudaDeviceProp device;
  Check(cudaGetDeviceProperties(&device, 0), "the device");
  printf("{\"device\": \"%s\", \"gigabytes_a_second\": %.0f}\n", device.name,
         bytes_a_microsecond / 1e3);
  const Model models[] = {{"1b", 2048, 8192, 32, 8, 64, 16}, {"3b", 3072, 8192, 24, 8, 128, 28}};
  for (const Model& model : models) {
    for (int tokens : {1, 6, 16}) {
      for (bool overlaps : {false, true}) TimeLayers(memory, model, tokens, overlaps);
      TimeProducts(memory, model, tokens);
    }
  }
  return 0;
}
