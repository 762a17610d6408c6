// A stand-in for libggml-cuda.so on the fake driver: a device named CUDA0 whose graphs the CPU backend computes.
//
// A cache that is built under export or import lies in the memory of the fake device, which the host can use while a
// graph is computed or a tensor is set or read, and not else: what takes an address of the device for one of the host,
// in llama.cpp or in the patch series, does not pass. Weights and compute buffers are plain memory of the host.
//
// It has what the series asks a CUDA backend for: devices by their PCI bus id, and ggml_backend_cuda_buffer_from_ptr.
// As the real one it pads rows of quantized tensors, and is no host buffer.

#include "ggml-backend-impl.h"
#include "ggml-cpu.h"

#include <cctype>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

extern "C" {
int  cuInit(unsigned flags);
int  cuDeviceGetCount(int * n);
int  cuDeviceGetPCIBusId(char * id, int size, int device);
void fake_cuda_compute(bool on);
}

namespace {

constexpr size_t ALIGNMENT   = 128;
constexpr int    ROW_PADDING = 512; // elements

struct computing {
    computing()  { fake_cuda_compute(true); }
    ~computing() { fake_cuda_compute(false); }
    computing(const computing &) = delete;
};

struct buffer {
    void * data;
    void (*free_ptr)(void * user_data);
    void * user_data;
};

struct device {
    std::string              name;
    std::string              bus_id;
    ggml_backend_buffer_type buft;
    ggml_backend_device      dev;
};

device & of(ggml_backend_dev_t dev) { return *(device *) dev->context; }

// -- buffers --

void * buffer_base(ggml_backend_buffer_t buf) { return ((buffer *) buf->context)->data; }

void buffer_free(ggml_backend_buffer_t buf) {
    auto * self = (buffer *) buf->context;
    self->free_ptr(self->user_data);
    delete self;
}

void buffer_memset(ggml_backend_buffer_t, ggml_tensor * t, uint8_t value, size_t offset, size_t size) {
    const computing here;
    memset((char *) t->data + offset, value, size);
}

void buffer_set(ggml_backend_buffer_t, ggml_tensor * t, const void * data, size_t offset, size_t size) {
    const computing here;
    memcpy((char *) t->data + offset, data, size);
}

void buffer_get(ggml_backend_buffer_t, const ggml_tensor * t, void * data, size_t offset, size_t size) {
    const computing here;
    memcpy(data, (const char *) t->data + offset, size);
}

void buffer_clear(ggml_backend_buffer_t buf, uint8_t value) {
    const computing here;
    memset(buffer_base(buf), value, buf->size);
}

ggml_status buffer_init_tensor(ggml_backend_buffer_t buf, ggml_tensor * t) {
    const size_t size = ggml_nbytes(t), padded = ggml_backend_buft_get_alloc_size(buf->buft, t);
    if (!t->view_src && padded > size) {
        const computing here;
        memset((char *) t->data + size, 0, padded - size);
    }
    return GGML_STATUS_SUCCESS;
}

const ggml_backend_buffer_i BUFFER = {
    /* .free_buffer   = */ buffer_free,
    /* .get_base      = */ buffer_base,
    /* .init_tensor   = */ buffer_init_tensor,
    /* .memset_tensor = */ buffer_memset,
    /* .set_tensor    = */ buffer_set,
    /* .get_tensor    = */ buffer_get,
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ nullptr,
    /* .clear         = */ buffer_clear,
    /* .reset         = */ nullptr,
};

ggml_backend_buffer_t buffer_from_ptr(ggml_backend_buffer_type_t buft, void * ptr, size_t size, void (*free_ptr)(void *), void * user_data) {
    return ggml_backend_buffer_init(buft, BUFFER, new buffer { ptr, free_ptr, user_data }, size);
}

const char * buft_name(ggml_backend_buffer_type_t buft) { return of(buft->device).name.c_str(); }

ggml_backend_buffer_t buft_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    void * data = nullptr;
    return posix_memalign(&data, 4096, size ? size : 1) ? nullptr : buffer_from_ptr(buft, data, size, free, data);
}

size_t buft_alignment(ggml_backend_buffer_type_t) { return ALIGNMENT; }

size_t buft_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor * t) {
    const int rest = t->ne[0] % ROW_PADDING;
    return ggml_nbytes(t) + (ggml_is_quantized(t->type) && rest ? ggml_row_size(t->type, ROW_PADDING - rest) : 0);
}

// -- streams --

const char * backend_name(ggml_backend_t backend) { return of(backend->device).name.c_str(); }

void backend_free(ggml_backend_t backend) {
    ggml_backend_free((ggml_backend_t) backend->context);
    delete backend;
}

ggml_status backend_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    const computing here;
    return ggml_backend_graph_compute((ggml_backend_t) backend->context, graph);
}

ggml_guid_t backend_guid() {
    static ggml_guid guid = { 'f', 'a', 'k', 'e' };
    return &guid;
}

// -- devices --

ggml_backend_dev_t cpu() { return ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0); }

const char * dev_name(ggml_backend_dev_t dev) { return of(dev).name.c_str(); }
const char * dev_description(ggml_backend_dev_t) { return "Fake GPU"; }

void dev_memory(ggml_backend_dev_t, size_t * free, size_t * total) { *free = *total = (size_t) 8 << 30; }

enum ggml_backend_dev_type dev_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }

void dev_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    *props = {};
    props->name        = dev_name(dev);
    props->description = dev_description(dev);
    props->type        = dev_type(dev);
    props->device_id   = of(dev).bus_id.c_str();
    dev_memory(dev, &props->memory_free, &props->memory_total);
}

ggml_backend_t dev_init(ggml_backend_dev_t dev, const char *) {
    ggml_backend_i iface = {};
    iface.get_name      = backend_name;
    iface.free          = backend_free;
    iface.graph_compute = backend_compute;
    ggml_backend_t host = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(host, 1);
    return new ggml_backend { backend_guid(), iface, dev, host };
}

ggml_backend_buffer_type_t dev_buft(ggml_backend_dev_t dev) { return &of(dev).buft; }

bool dev_supports_op(ggml_backend_dev_t, const ggml_tensor * op) { return ggml_backend_dev_supports_op(cpu(), op); }
bool dev_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) { return buft == dev_buft(dev); }

const ggml_backend_device_i DEVICE = {
    /* .get_name             = */ dev_name,
    /* .get_description      = */ dev_description,
    /* .get_memory           = */ dev_memory,
    /* .get_type             = */ dev_type,
    /* .get_props            = */ dev_props,
    /* .init_backend         = */ dev_init,
    /* .get_buffer_type      = */ dev_buft,
    /* .get_host_buffer_type = */ nullptr,
    /* .buffer_from_host_ptr = */ nullptr,
    /* .supports_op          = */ dev_supports_op,
    /* .supports_buft        = */ dev_supports_buft,
    /* .offload_op           = */ nullptr,
    /* .event_new            = */ nullptr,
    /* .event_free           = */ nullptr,
    /* .event_synchronize    = */ nullptr,
};

// -- registry --

const std::vector<std::unique_ptr<device>> & devices(ggml_backend_reg_t reg) {
    static std::vector<std::unique_ptr<device>> res;
    int n = 0;
    if (res.empty() && cuInit(0) == 0 && cuDeviceGetCount(&n) == 0) {
        for (int i = 0; i < n; i++) {
            char id[32] = "";
            cuDeviceGetPCIBusId(id, sizeof(id), i);
            for (char * c = id; *c; c++) {
                *c = (char) tolower(*c);
            }
            res.push_back(std::make_unique<device>());
            device & self = *res.back();
            self.name   = "CUDA" + std::to_string(i);
            self.bus_id = id;
            self.dev    = { DEVICE, reg, &self };
            self.buft   = { { buft_name, buft_alloc, buft_alignment, nullptr, buft_alloc_size, nullptr }, &self.dev, nullptr };
        }
    }
    return res;
}

const char * reg_name(ggml_backend_reg_t) { return "CUDA"; }
size_t reg_count(ggml_backend_reg_t reg) { return devices(reg).size(); }
ggml_backend_dev_t reg_device(ggml_backend_reg_t reg, size_t i) { return &devices(reg)[i]->dev; }

void * reg_proc_address(ggml_backend_reg_t, const char * name) {
    // FAKE_CUDA_BACKEND=stock: that of an unpatched llama.cpp
    const char * kind = getenv("FAKE_CUDA_BACKEND");
    const bool is_stock = kind && strcmp(kind, "stock") == 0;
    return !is_stock && strcmp(name, "ggml_backend_cuda_buffer_from_ptr") == 0 ? (void *) buffer_from_ptr : nullptr;
}

} // namespace

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_cuda_reg(void) {
    static ggml_backend_reg reg = { GGML_BACKEND_API_VERSION, { reg_name, reg_count, reg_device, reg_proc_address }, nullptr };
    return &reg;
}
