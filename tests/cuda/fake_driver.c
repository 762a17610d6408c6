// A stand-in for libcuda.so.1: what kvshare and its patch series need of the CUDA driver API, without a GPU.
//
// Device memory is a memfd. As with the real driver
// - the address that a process gets for it cannot be read or written by the host: only the copy functions can,
//   which use a second mapping that nobody else knows;
// - what is exported is a descriptor that is no file, has no size and no seals: here a socket in which the memfd
//   lies, which every importer takes a copy of;
// - memory lives as long as a handle, a mapping, or an exported descriptor does, and no longer, whatever happens
//   to the processes;
// - what a stream was given is done when it, its context or a copy that waits is synchronised, not before;
// - sizes are multiples of the granularity, mappings are unmapped whole, ranges are freed when nothing is mapped
//   there, and access has to be granted; else the call fails with the result that the real one gives.
//
// Environment, read with every call:
//   FAKE_CUDA_DEVICES=2              devices of the machine
//   CUDA_VISIBLE_DEVICES=1,0         those that this process sees, by index or GPU-uuid (read by cuInit)
//   FAKE_CUDA_GRANULARITY=65536      bytes, a multiple of the page size
//   FAKE_CUDA_MEMORY=1048576         bytes that this process may create
//   FAKE_CUDA_VERSION=11020          what cuDriverGetVersion says
//   FAKE_CUDA_ATTRIBUTES=102=0,124=0 device attributes, by number; -1: unknown
//   FAKE_CUDA_PEERS=1                the devices can use each other's memory
//   FAKE_CUDA_FAIL=cuMemMap=2,cuMemCreate=999@3   results of calls: of each, or of the third only
//
// It has one kernel, kv_share_copy(table, n) of the patch series. A backend that computes on the host instead of a GPU
// may do so between fake_cuda_compute(true) and fake_cuda_compute(false): device memory is then the host's as well.
//
// For tests: fake_cuda_live(WHAT) counts what has not been given back, fake_cuda_reset() forgets all calls and,
// after a test that has left something, everything else.

#define _GNU_SOURCE

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUhandle;
typedef struct context * CUcontext;

enum {
    SUCCESS         = 0,
    INVALID_VALUE   = 1,
    OUT_OF_MEMORY   = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE       = 100,
    INVALID_DEVICE  = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE  = 400,
    NOT_FOUND       = 500,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_FAILED   = 719,
    NOT_SUPPORTED   = 801,
    UNKNOWN         = 999,
};

enum { MAX_DEVICES = 8, MAX_OBJECTS = 8192, MAX_STACK = 32, MAX_FUNCTIONS = 64, MAX_WORK = 4096 };

enum { ATTRIBUTE_MAJOR = 75, ATTRIBUTE_MINOR = 76, ATTRIBUTE_VMM = 102, ATTRIBUTE_POSIX_FD = 103, ATTRIBUTE_DMA_BUF = 124 };

typedef struct { int type; int id; } CUlocation;

typedef struct {
    int        type;
    int        handle_types;
    CUlocation location;
    void     * win32;
    struct { unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4]; } flags;
} CUprop;

typedef struct { CUlocation location; int flags; } CUaccess;

typedef struct {
    size_t src_x, src_y; int src_type; const void * src_host; CUdeviceptr src_device; void * src_array; size_t src_pitch;
    size_t dst_x, dst_y; int dst_type;       void * dst_host; CUdeviceptr dst_device; void * dst_array; size_t dst_pitch;
    size_t width, height;
} CUcopy2d;

struct context { int n_retained; int device; }; // device of the machine

struct allocation { bool used; int memfd; size_t size; int device; int n_handles; int n_mappings; bool exportable, created; };

// a handle of the caller's: 1 + index of its allocation, and a number that tells its uses apart
struct handle { bool used; int allocation; };

struct range { bool used; uintptr_t start; size_t size; };

struct mapping { bool used; uintptr_t start; size_t size; uint8_t * shadow; int allocation; int access; };

struct pinned { bool used; void * start; };

// work of a stream that is not done yet: n pieces of a table, or one piece
struct piece { uint64_t dst, src, size; };
struct work  { const struct piece * table; uint32_t n; struct piece one; };

// what lies in an exported descriptor, beside the memfd
struct exported { char magic[8]; uint64_t size; int32_t device; int32_t zero; };

static const char MAGIC[8] = "FAKECUDA";

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static bool              is_ready;
static int               visible[MAX_DEVICES];
static int               n_visible;
static size_t            n_created; // bytes
static struct context    contexts[MAX_DEVICES];
static struct allocation allocations[MAX_OBJECTS];
static struct handle     handles[MAX_OBJECTS];
static struct range      ranges[MAX_OBJECTS];
static struct mapping    mappings[MAX_OBJECTS];
static struct pinned     pinned[MAX_OBJECTS];

static struct work       work[MAX_WORK];
static int               n_work;
static int               n_computing;

static __thread CUcontext stack[MAX_STACK];
static __thread int       n_stack;

// -- environment -----------------------------------------------------------------------------

static size_t number(const char * name, size_t otherwise) {
    const char * text = getenv(name);
    return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

static size_t granularity(void) { return number("FAKE_CUDA_GRANULARITY", 2 << 20); }

static int n_devices(void) {
    const size_t n = number("FAKE_CUDA_DEVICES", 1);
    return n < MAX_DEVICES ? (int) n : MAX_DEVICES;
}

static struct { char name[64]; int n; } calls[MAX_FUNCTIONS];

// how often a function was called, this time among them
static int count(const char * name) {
    for (int i = 0; i < MAX_FUNCTIONS; i++) {
        if (!calls[i].name[0]) {
            snprintf(calls[i].name, sizeof(calls[i].name), "%s", name);
        }
        if (strcmp(calls[i].name, name) == 0) {
            return ++calls[i].n;
        }
    }
    return 0;
}

// the result that the environment has planted for this call
static CUresult planted(const char * name) {
    const int    n    = count(name);
    const char * text = getenv("FAKE_CUDA_FAIL");
    const size_t size = strlen(name);
    for (const char * at = text; at && *at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        if (strncmp(at, name, size) == 0 && at[size] == '=') {
            char *    end    = NULL;
            const int result = (int) strtol(at + size + 1, &end, 10);
            if (*end != '@' || strtol(end + 1, NULL, 10) == n) {
                return result;
            }
        }
    }
    return SUCCESS;
}

static CUresult begin(const char * name, bool needs_init) {
    pthread_mutex_lock(&lock);
    const CUresult result = planted(name);
    return result ? result : needs_init && !is_ready ? NOT_INITIALIZED : SUCCESS;
}

static CUresult end(CUresult result) {
    pthread_mutex_unlock(&lock);
    return result;
}

#define BEGIN() do { const CUresult result_ = begin(__func__, true);  if (result_) { return end(result_); } } while (0)
#define BEGIN_BEFORE_INIT() do { const CUresult result_ = begin(__func__, false); if (result_) { return end(result_); } } while (0)
#define BEGIN_IN_CONTEXT() do { BEGIN(); if (!n_stack) { return end(INVALID_CONTEXT); } } while (0)
#define REQUIRE(condition, result) do { if (!(condition)) { return end(result); } } while (0)

// -- devices ---------------------------------------------------------------------------------

static void uuid_of(int device, unsigned char uuid[16]) {
    for (int i = 0; i < 16; i++) {
        uuid[i] = (unsigned char) (0x40 + 16 * device + i);
    }
}

static void uuid_text(int device, char text[48]) {
    unsigned char u[16];
    uuid_of(device, u);
    snprintf(text, 48, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
        u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
}

// as the real one: the list ends at the first entry that is none
static void find_visible(void) {
    const char * text = getenv("CUDA_VISIBLE_DEVICES");
    n_visible = 0;
    if (!text) {
        while (n_visible < n_devices()) {
            visible[n_visible] = n_visible;
            n_visible++;
        }
        return;
    }
    while (*text && n_visible < MAX_DEVICES) {
        const size_t size  = strcspn(text, ",");
        int          found = -1;
        for (int device = 0; device < n_devices(); device++) {
            char uuid[48], index[8];
            uuid_text(device, uuid);
            snprintf(index, sizeof(index), "%d", device);
            if ((strlen(index) == size && strncmp(text, index, size) == 0) || (size > 4 && strncmp(text, uuid, size) == 0)) {
                found = device;
            }
        }
        if (found < 0) {
            return;
        }
        visible[n_visible++] = found;
        text += size + (text[size] == ',');
    }
}

CUresult cuInit(unsigned flags) {
    BEGIN_BEFORE_INIT();
    REQUIRE(flags == 0, INVALID_VALUE);
    if (!is_ready) {
        find_visible();
    }
    REQUIRE(n_visible > 0, NO_DEVICE);
    is_ready = true;
    return end(SUCCESS);
}

CUresult cuDriverGetVersion(int * version) {
    BEGIN_BEFORE_INIT();
    *version = (int) number("FAKE_CUDA_VERSION", 12040);
    return end(SUCCESS);
}

CUresult cuDeviceGetCount(int * n) {
    BEGIN();
    *n = n_visible;
    return end(SUCCESS);
}

CUresult cuDeviceGet(CUdevice * device, int ordinal) {
    BEGIN();
    REQUIRE(ordinal >= 0 && ordinal < n_visible, INVALID_DEVICE);
    *device = ordinal;
    return end(SUCCESS);
}

static bool is_device(CUdevice device) { return device >= 0 && device < n_visible; }

CUresult cuDeviceGetName(char * name, int size, CUdevice device) {
    BEGIN();
    REQUIRE(is_device(device) && size > 0, INVALID_VALUE);
    snprintf(name, (size_t) size, "Fake GPU %d", visible[device]);
    return end(SUCCESS);
}

CUresult cuDeviceGetPCIBusId(char * id, int size, CUdevice device) {
    BEGIN();
    REQUIRE(is_device(device), INVALID_DEVICE);
    REQUIRE(size >= 13, INVALID_VALUE);
    snprintf(id, (size_t) size, "0000:%02X:00.0", 0x1a + visible[device]);
    return end(SUCCESS);
}

CUresult cuDeviceGetByPCIBusId(CUdevice * device, const char * id) {
    BEGIN();
    for (int i = 0; i < n_visible; i++) {
        char found[16];
        snprintf(found, sizeof(found), "0000:%02x:00.0", 0x1a + visible[i]);
        if (strcasecmp(id, found) == 0) {
            *device = i;
            return end(SUCCESS);
        }
    }
    return end(INVALID_DEVICE);
}

CUresult cuDeviceCanAccessPeer(int * can_access, CUdevice device, CUdevice peer) {
    BEGIN();
    REQUIRE(is_device(device) && is_device(peer), INVALID_DEVICE);
    *can_access = device != peer && number("FAKE_CUDA_PEERS", 0);
    return end(SUCCESS);
}

CUresult cuDeviceGetUuid_v2(unsigned char * uuid, CUdevice device) {
    BEGIN();
    REQUIRE(is_device(device), INVALID_DEVICE);
    uuid_of(visible[device], uuid);
    return end(SUCCESS);
}

static int attribute(int wanted) {
    const char * text = getenv("FAKE_CUDA_ATTRIBUTES");
    for (const char * at = text; at && *at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        char * value = NULL;
        if (strtol(at, &value, 10) == wanted && *value == '=') {
            return (int) strtol(value + 1, NULL, 10);
        }
    }
    switch (wanted) {
        case ATTRIBUTE_MAJOR:                                              return 9;
        case ATTRIBUTE_VMM: case ATTRIBUTE_POSIX_FD: case ATTRIBUTE_DMA_BUF: return 1;
        default:                                                           return 0;
    }
}

CUresult cuDeviceGetAttribute(int * value, int wanted, CUdevice device) {
    BEGIN();
    REQUIRE(is_device(device), INVALID_DEVICE);
    *value = attribute(wanted);
    REQUIRE(*value >= 0, INVALID_VALUE);
    return end(SUCCESS);
}

CUresult cuDeviceTotalMem_v2(size_t * size, CUdevice device) {
    BEGIN();
    REQUIRE(is_device(device), INVALID_DEVICE);
    *size = number("FAKE_CUDA_MEMORY", (size_t) 1 << 30);
    return end(SUCCESS);
}

// -- contexts --------------------------------------------------------------------------------

CUresult cuDevicePrimaryCtxRetain(CUcontext * context, CUdevice device) {
    BEGIN();
    REQUIRE(is_device(device), INVALID_DEVICE);
    *context = &contexts[visible[device]];
    (*context)->device = visible[device];
    (*context)->n_retained++;
    return end(SUCCESS);
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    BEGIN();
    REQUIRE(is_device(device), INVALID_DEVICE);
    REQUIRE(contexts[visible[device]].n_retained > 0, INVALID_CONTEXT);
    contexts[visible[device]].n_retained--;
    return end(SUCCESS);
}

static bool is_context(CUcontext context) {
    return context >= contexts && context < contexts + MAX_DEVICES && context->n_retained > 0;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    BEGIN();
    REQUIRE(is_context(context) && n_stack < MAX_STACK, INVALID_CONTEXT);
    stack[n_stack++] = context;
    return end(SUCCESS);
}

CUresult cuCtxPopCurrent_v2(CUcontext * context) {
    BEGIN();
    REQUIRE(n_stack > 0, INVALID_CONTEXT);
    n_stack--;
    if (context) {
        *context = stack[n_stack];
    }
    return end(SUCCESS);
}

CUresult cuCtxSetCurrent(CUcontext context) {
    BEGIN();
    REQUIRE(!context || is_context(context), INVALID_CONTEXT);
    n_stack -= n_stack > 0;
    if (context) {
        stack[n_stack++] = context;
    }
    return end(SUCCESS);
}

CUresult cuCtxGetCurrent(CUcontext * context) {
    BEGIN();
    *context = n_stack ? stack[n_stack - 1] : NULL;
    return end(SUCCESS);
}

static CUresult do_work(void);

CUresult cuCtxSynchronize(void) {
    BEGIN_IN_CONTEXT();
    return end(do_work());
}

CUresult cuStreamCreate(void ** stream, unsigned flags) {
    BEGIN_IN_CONTEXT();
    REQUIRE(flags <= 1, INVALID_VALUE);
    *stream = stack[n_stack - 1]; // one a device is enough
    return end(SUCCESS);
}

CUresult cuStreamDestroy_v2(void * stream) {
    BEGIN_IN_CONTEXT();
    REQUIRE(stream, INVALID_HANDLE);
    return end(do_work());
}

CUresult cuStreamSynchronize(void * stream) {
    BEGIN_IN_CONTEXT();
    (void) stream;
    return end(do_work());
}

// -- virtual memory --------------------------------------------------------------------------

#define FREE_SLOT(array) free_slot(&(array)[0].used, sizeof((array)[0]))

static int free_slot(bool * used, size_t step) {
    for (int i = 0; i < MAX_OBJECTS; i++) {
        if (!*(bool *) ((char *) used + step * (size_t) i)) {
            return i;
        }
    }
    return -1;
}

static void drop_unused(struct allocation * each) {
    if (each->used && !each->n_handles && !each->n_mappings) {
        close(each->memfd);
        n_created -= each->created ? each->size : 0;
        each->used = false;
    }
}

static CUresult new_handle(int memfd, size_t size, int device, bool exportable, bool created, CUhandle * handle) {
    const int i = FREE_SLOT(allocations), j = FREE_SLOT(handles);
    if (i < 0 || j < 0) {
        close(memfd);
        return OUT_OF_MEMORY;
    }
    allocations[i] = (struct allocation) { true, memfd, size, device, 1, 0, exportable, created };
    handles[j]     = (struct handle) { true, i };
    n_created     += created ? size : 0;
    *handle        = 0x5000 + (CUhandle) j;
    return SUCCESS;
}

static struct handle * handle_of(CUhandle handle) {
    return handle >= 0x5000 && handle < 0x5000 + MAX_OBJECTS && handles[handle - 0x5000].used ? &handles[handle - 0x5000] : NULL;
}

static CUresult check_prop(const CUprop * prop) {
    return prop->type != 1 || prop->location.type != 1 ? INVALID_VALUE :
           !is_device(prop->location.id)               ? INVALID_DEVICE :
           !attribute(ATTRIBUTE_VMM)                   ? NOT_SUPPORTED :
           prop->handle_types & ~1                     ? NOT_SUPPORTED :
           prop->handle_types && !attribute(ATTRIBUTE_POSIX_FD) ? NOT_SUPPORTED : SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t * size, const CUprop * prop, int option) {
    BEGIN();
    const CUresult result = check_prop(prop);
    REQUIRE(!result, result);
    REQUIRE(option == 0 || option == 1, INVALID_VALUE);
    *size = granularity();
    return end(SUCCESS);
}

CUresult cuMemCreate(CUhandle * handle, size_t size, const CUprop * prop, unsigned long long flags) {
    BEGIN();
    const CUresult result = check_prop(prop);
    REQUIRE(!result, result);
    REQUIRE(size && size % granularity() == 0 && !flags, INVALID_VALUE);
    REQUIRE(n_created + size <= number("FAKE_CUDA_MEMORY", (size_t) 1 << 30), OUT_OF_MEMORY);
    const int memfd = memfd_create("fake-cuda", MFD_CLOEXEC);
    REQUIRE(memfd >= 0, OUT_OF_MEMORY);
    REQUIRE(!ftruncate(memfd, (off_t) size) || close(memfd), OUT_OF_MEMORY);
    // fresh device memory is not zero
    uint8_t * bytes = mmap(NULL, size, PROT_WRITE, MAP_SHARED, memfd, 0);
    REQUIRE(bytes != MAP_FAILED || close(memfd), OUT_OF_MEMORY);
    for (size_t i = 0; i < size; i += 512) {
        bytes[i] = 0xcd;
    }
    munmap(bytes, size);
    return end(new_handle(memfd, size, visible[prop->location.id], prop->handle_types & 1, true, handle));
}

CUresult cuMemRelease(CUhandle handle) {
    BEGIN();
    struct handle * each = handle_of(handle);
    REQUIRE(each, INVALID_VALUE);
    each->used = false;
    allocations[each->allocation].n_handles--;
    drop_unused(&allocations[each->allocation]);
    return end(SUCCESS);
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUprop * prop, CUhandle handle) {
    BEGIN();
    struct handle * each = handle_of(handle);
    REQUIRE(each, INVALID_VALUE);
    *prop = (CUprop) { .type = 1, .handle_types = allocations[each->allocation].exportable, .location = { 1, -1 } };
    for (int i = 0; i < n_visible; i++) {
        if (visible[i] == allocations[each->allocation].device) {
            prop->location.id = i;
        }
    }
    return end(SUCCESS);
}

CUresult cuMemExportToShareableHandle(void * shareable, CUhandle handle, int type, unsigned long long flags) {
    BEGIN();
    struct handle * each = handle_of(handle);
    REQUIRE(each && type == 1 && !flags, INVALID_VALUE);
    const struct allocation * what = &allocations[each->allocation];
    REQUIRE(what->exportable, INVALID_VALUE);

    struct exported content = { .size = what->size, .device = what->device };
    memcpy(content.magic, MAGIC, sizeof(MAGIC));
    union { char bytes[CMSG_SPACE(sizeof(int))]; struct cmsghdr align; } control = { 0 };
    struct iovec  part    = { &content, sizeof(content) };
    struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control) };
    struct cmsghdr * head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type  = SCM_RIGHTS;
    head->cmsg_len   = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(head), &what->memfd, sizeof(int));

    int sockets[2];
    REQUIRE(!socketpair(AF_UNIX, SOCK_DGRAM, 0, sockets), OUT_OF_MEMORY); // not close-on-exec
    const bool sent = sendmsg(sockets[0], &message, MSG_NOSIGNAL) == sizeof(content);
    close(sockets[0]);
    REQUIRE(sent || close(sockets[1]), UNKNOWN);
    *(int *) shareable = sockets[1];
    return end(SUCCESS);
}

CUresult cuMemImportFromShareableHandle(CUhandle * handle, void * os_handle, int type) {
    BEGIN();
    REQUIRE(type == 1, INVALID_VALUE);
    struct exported content;
    union { char bytes[CMSG_SPACE(sizeof(int))]; struct cmsghdr align; } control = { 0 };
    struct iovec  part    = { &content, sizeof(content) };
    struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control) };
    const ssize_t n = recvmsg((int) (intptr_t) os_handle, &message, MSG_PEEK | MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    struct cmsghdr * head = n < 0 ? NULL : CMSG_FIRSTHDR(&message);
    int memfd = -1;
    if (head && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS) {
        memcpy(&memfd, CMSG_DATA(head), sizeof(int));
    }
    REQUIRE(memfd >= 0, INVALID_VALUE);
    bool is_visible = false;
    for (int i = 0; i < n_visible; i++) {
        is_visible = is_visible || visible[i] == content.device;
    }
    REQUIRE((n == sizeof(content) && memcmp(content.magic, MAGIC, sizeof(MAGIC)) == 0) || close(memfd), INVALID_VALUE);
    REQUIRE(is_visible || close(memfd), INVALID_DEVICE);
    return end(new_handle(memfd, content.size, content.device, true, false, handle));
}

CUresult cuMemAddressReserve(CUdeviceptr * start, size_t size, size_t alignment, CUdeviceptr wanted, unsigned long long flags) {
    BEGIN();
    const size_t step = alignment ? alignment : granularity();
    REQUIRE(size && size % granularity() == 0 && (step & (step - 1)) == 0 && !flags, INVALID_VALUE);
    (void) wanted; // a wish
    const int i = FREE_SLOT(ranges);
    REQUIRE(i >= 0, OUT_OF_MEMORY);
    char * all = mmap(NULL, size + step, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(all != MAP_FAILED, OUT_OF_MEMORY);
    char * first = (char *) (((uintptr_t) all + step - 1) & ~(uintptr_t) (step - 1));
    if (first > all) {
        munmap(all, (size_t) (first - all));
    }
    if (all + step > first) {
        munmap(first + size, (size_t) (all + step - first));
    }
    ranges[i] = (struct range) { true, (uintptr_t) first, size };
    *start = (CUdeviceptr) (uintptr_t) first;
    return end(SUCCESS);
}

static bool overlaps(const struct mapping * each, uintptr_t start, size_t size) {
    return each->used && each->start < start + size && start < each->start + each->size;
}

CUresult cuMemAddressFree(CUdeviceptr start, size_t size) {
    BEGIN();
    for (int i = 0; i < MAX_OBJECTS; i++) {
        REQUIRE(!overlaps(&mappings[i], start, size), INVALID_VALUE);
    }
    for (int i = 0; i < MAX_OBJECTS; i++) {
        if (ranges[i].used && ranges[i].start == start && ranges[i].size == size) {
            munmap((void *) (uintptr_t) start, size);
            ranges[i].used = false;
            return end(SUCCESS);
        }
    }
    return end(INVALID_VALUE);
}

CUresult cuMemMap(CUdeviceptr start, size_t size, size_t offset, CUhandle handle, unsigned long long flags) {
    BEGIN();
    struct handle * each = handle_of(handle);
    REQUIRE(each && size && size % granularity() == 0 && start % granularity() == 0 && !offset && !flags, INVALID_VALUE);
    REQUIRE(size <= allocations[each->allocation].size, INVALID_VALUE);
    bool reserved = false;
    for (int i = 0; i < MAX_OBJECTS; i++) {
        REQUIRE(!overlaps(&mappings[i], start, size), INVALID_VALUE);
        reserved = reserved || (ranges[i].used && ranges[i].start <= start && start + size <= ranges[i].start + ranges[i].size);
    }
    REQUIRE(reserved, INVALID_VALUE);
    const int i = FREE_SLOT(mappings);
    REQUIRE(i >= 0, OUT_OF_MEMORY);
    uint8_t * shadow = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, allocations[each->allocation].memfd, 0);
    REQUIRE(shadow != MAP_FAILED, OUT_OF_MEMORY);
    mappings[i] = (struct mapping) { true, (uintptr_t) start, size, shadow, each->allocation, 0 };
    allocations[each->allocation].n_mappings++;
    return end(SUCCESS);
}

enum { READ = 1, READ_WRITE = 3 };

static void set_host_access(struct mapping * each, bool on) {
    void * start = (void *) each->start;
    if (on && each->access == READ_WRITE) {
        mmap(start, each->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, allocations[each->allocation].memfd, 0);
    } else if (!on) {
        mmap(start, each->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    }
}

// the mappings in a range have to fill it, and lie in it
static bool is_whole(uintptr_t start, size_t size) {
    size_t found = 0;
    for (int i = 0; i < MAX_OBJECTS; i++) {
        if (overlaps(&mappings[i], start, size)) {
            if (mappings[i].start < start || mappings[i].start + mappings[i].size > start + size) {
                return false;
            }
            found += mappings[i].size;
        }
    }
    return size && found == size;
}

CUresult cuMemUnmap(CUdeviceptr start, size_t size) {
    BEGIN();
    REQUIRE(is_whole(start, size), INVALID_VALUE);
    for (int i = 0; i < MAX_OBJECTS; i++) {
        if (overlaps(&mappings[i], start, size)) {
            set_host_access(&mappings[i], false);
            munmap(mappings[i].shadow, mappings[i].size);
            mappings[i].used = false;
            allocations[mappings[i].allocation].n_mappings--;
            drop_unused(&allocations[mappings[i].allocation]);
        }
    }
    return end(SUCCESS);
}

CUresult cuMemSetAccess(CUdeviceptr start, size_t size, const CUaccess * accesses, size_t n) {
    BEGIN();
    REQUIRE(is_whole(start, size) && n, INVALID_VALUE);
    for (size_t k = 0; k < n; k++) {
        REQUIRE(accesses[k].location.type == 1 && is_device(accesses[k].location.id), INVALID_DEVICE);
        REQUIRE(accesses[k].flags == 0 || accesses[k].flags == 1 || accesses[k].flags == 3, INVALID_VALUE);
        for (int i = 0; i < MAX_OBJECTS; i++) {
            if (overlaps(&mappings[i], start, size)) {
                const bool is_own = allocations[mappings[i].allocation].device == visible[accesses[k].location.id];
                REQUIRE(is_own || number("FAKE_CUDA_PEERS", 0), INVALID_DEVICE);
                mappings[i].access = accesses[k].flags;
            }
        }
    }
    return end(SUCCESS);
}

CUresult cuMemGetHandleForAddressRange(void * handle, CUdeviceptr start, size_t size, int type, unsigned long long flags) {
    BEGIN();
    REQUIRE(type == 1 && !flags && size && start % 4096 == 0 && size % 4096 == 0, INVALID_VALUE);
    REQUIRE(attribute(ATTRIBUTE_DMA_BUF), NOT_SUPPORTED);
    for (int i = 0; i < MAX_OBJECTS; i++) {
        if (mappings[i].used && mappings[i].start <= start && start + size <= mappings[i].start + mappings[i].size) {
            const int fd = fcntl(allocations[mappings[i].allocation].memfd, F_DUPFD_CLOEXEC, 3);
            REQUIRE(fd >= 0, OUT_OF_MEMORY);
            *(int *) handle = fd;
            return end(SUCCESS);
        }
    }
    return end(INVALID_VALUE);
}

// -- copies ----------------------------------------------------------------------------------

// where the bytes at a device address are, and how many of them
static uint8_t * bytes_at(CUdeviceptr start, int access, size_t * n) {
    for (int i = 0; i < MAX_OBJECTS; i++) {
        const struct mapping * each = &mappings[i];
        if (each->used && each->start <= start && start < each->start + each->size && (each->access & access) == access) {
            *n = each->start + each->size - start;
            return each->shadow + (start - each->start);
        }
    }
    return NULL;
}

static bool is_accessible(CUdeviceptr start, size_t size, int access) {
    while (size) {
        size_t n = 0;
        if (!bytes_at(start, access, &n)) {
            return false;
        }
        n      = n < size ? n : size;
        start += n;
        size  -= n;
    }
    return true;
}

static CUresult to_host(uint8_t * to, CUdeviceptr from, size_t size) {
    if (!is_accessible(from, size, READ)) {
        return ILLEGAL_ADDRESS;
    }
    for (size_t n = 0; size; to += n, from += n, size -= n) {
        const uint8_t * bytes = bytes_at(from, READ, &n);
        n = n < size ? n : size;
        memcpy(to, bytes, n);
    }
    return SUCCESS;
}

static CUresult to_device(CUdeviceptr to, const uint8_t * from, size_t size) {
    if (!is_accessible(to, size, READ_WRITE)) {
        return ILLEGAL_ADDRESS;
    }
    for (size_t n = 0; size; to += n, from += n, size -= n) {
        uint8_t * bytes = bytes_at(to, READ_WRITE, &n);
        n = n < size ? n : size;
        memcpy(bytes, from, n);
    }
    return SUCCESS;
}

static bool is_on_device(uint64_t address) {
    for (int i = 0; i < MAX_OBJECTS; i++) {
        if (ranges[i].used && ranges[i].start <= address && address < ranges[i].start + ranges[i].size) {
            return true;
        }
    }
    return false;
}

static CUresult copy_piece(const struct piece * piece) {
    const bool from_device = is_on_device(piece->src), into_device = is_on_device(piece->dst);
    if (!from_device && !into_device) {
        memcpy((void *) (uintptr_t) piece->dst, (const void *) (uintptr_t) piece->src, piece->size);
        return SUCCESS;
    }
    if (!into_device) {
        return to_host((uint8_t *) (uintptr_t) piece->dst, piece->src, piece->size);
    }
    if (!from_device) {
        return to_device(piece->dst, (const uint8_t *) (uintptr_t) piece->src, piece->size);
    }
    uint8_t * bytes = malloc(piece->size ? piece->size : 1);
    if (!bytes) {
        return OUT_OF_MEMORY;
    }
    CUresult result = to_host(bytes, piece->src, piece->size);
    result = result ? result : to_device(piece->dst, bytes, piece->size);
    free(bytes);
    return result;
}

// do what streams were given; the tables are read now, as a kernel would
static CUresult do_work(void) {
    CUresult result = SUCCESS;
    for (int i = 0; i < n_work && !result; i++) {
        for (uint32_t k = 0; k < work[i].n && !result; k++) {
            result = copy_piece(work[i].table ? &work[i].table[k] : &work[i].one);
        }
    }
    n_work = 0;
    return result;
}

static CUresult give_work(const struct piece * table, uint32_t n, struct piece one) {
    if (n_work == MAX_WORK) {
        const CUresult result = do_work();
        if (result) {
            return result;
        }
    }
    work[n_work++] = (struct work) { table, n, one };
    return SUCCESS;
}

CUresult cuModuleLoadData(void ** module, const void * image) {
    BEGIN_IN_CONTEXT();
    REQUIRE(image && strstr(image, ".version") && strstr(image, "kv_share_copy"), INVALID_VALUE);
    *module = (void *) &work;
    return end(SUCCESS);
}

CUresult cuModuleUnload(void * module) {
    BEGIN_IN_CONTEXT();
    REQUIRE(module == &work, INVALID_HANDLE);
    return end(SUCCESS);
}

CUresult cuModuleGetFunction(void ** function, void * module, const char * name) {
    BEGIN_IN_CONTEXT();
    REQUIRE(module == &work, INVALID_HANDLE);
    REQUIRE(strcmp(name, "kv_share_copy") == 0, NOT_FOUND);
    *function = module;
    return end(SUCCESS);
}

CUresult cuLaunchKernel(void * function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
        unsigned block_z, unsigned shared, void * stream, void ** params, void ** extra) {
    BEGIN_IN_CONTEXT();
    (void) stream;
    REQUIRE(function == &work, INVALID_HANDLE);
    REQUIRE(grid_x && grid_y == 1 && grid_z == 1 && block_x && block_x <= 1024 && block_y == 1 && block_z == 1, INVALID_VALUE);
    REQUIRE(!shared && params && !extra, INVALID_VALUE);
    const struct piece * table = (const struct piece *) (uintptr_t) *(const uint64_t *) params[0];
    const uint32_t       n     = *(const uint32_t *) params[1];
    const uint32_t       warps = grid_x*block_x/32; // a warp a piece: what has none is not copied
    return end(give_work(table, n < warps ? n : warps, (struct piece) { 0, 0, 0 }));
}

// copies that a stream is given; those from and to memory of the host that is not pinned wait, as in the real one
static CUresult copy_async(uint64_t to, uint64_t from, size_t size, bool waits) {
    CUresult result = give_work(NULL, 1, (struct piece) { to, from, size });
    return result || !waits ? result : do_work();
}

static bool is_pinned(const void * start) {
    for (int i = 0; i < MAX_OBJECTS; i++) {
        if (pinned[i].used && pinned[i].start == start) {
            return true;
        }
    }
    return false;
}

CUresult cuMemcpyDtoHAsync_v2(void * to, CUdeviceptr from, size_t size, void * stream) {
    BEGIN_IN_CONTEXT();
    (void) stream;
    return end(copy_async((uintptr_t) to, from, size, !is_pinned(to)));
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void * from, size_t size, void * stream) {
    BEGIN_IN_CONTEXT();
    (void) stream;
    return end(copy_async(to, (uintptr_t) from, size, !is_pinned(from)));
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, void * stream) {
    BEGIN_IN_CONTEXT();
    (void) stream;
    return end(copy_async(to, from, size, false));
}

CUresult cuMemsetD8_v2(CUdeviceptr start, unsigned char value, size_t size) {
    BEGIN_IN_CONTEXT();
    REQUIRE(is_accessible(start, size, READ_WRITE), ILLEGAL_ADDRESS);
    for (size_t n = 0; size; start += n, size -= n) {
        uint8_t * bytes = bytes_at(start, READ_WRITE, &n);
        n = n < size ? n : size;
        memset(bytes, value, n);
    }
    return end(SUCCESS);
}

CUresult cuMemcpyDtoH_v2(void * to, CUdeviceptr from, size_t size) {
    BEGIN_IN_CONTEXT();
    REQUIRE(is_accessible(from, size, READ), ILLEGAL_ADDRESS);
    return end(copy_async((uintptr_t) to, from, size, true));
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void * from, size_t size) {
    BEGIN_IN_CONTEXT();
    REQUIRE(is_accessible(to, size, READ_WRITE), ILLEGAL_ADDRESS);
    return end(copy_async(to, (uintptr_t) from, size, true));
}

CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t size) {
    BEGIN_IN_CONTEXT();
    REQUIRE(is_accessible(from, size, READ) && is_accessible(to, size, READ_WRITE), ILLEGAL_ADDRESS);
    return end(copy_async(to, from, size, true));
}

CUresult cuMemcpy2D_v2(const CUcopy2d * copy) {
    enum { HOST = 1, DEVICE = 2 };
    BEGIN_IN_CONTEXT();
    const bool up = copy->src_type == HOST && copy->dst_type == DEVICE, down = copy->src_type == DEVICE && copy->dst_type == HOST;
    REQUIRE(up || down, NOT_SUPPORTED);
    REQUIRE(copy->src_pitch >= copy->src_x + copy->width && copy->dst_pitch >= copy->dst_x + copy->width, INVALID_VALUE);
    CUresult result = SUCCESS;
    for (size_t y = 0; y < copy->height && !result; y++) {
        const size_t from = copy->src_x + (copy->src_y + y) * copy->src_pitch;
        const size_t to   = copy->dst_x + (copy->dst_y + y) * copy->dst_pitch;
        result = up ? to_device(copy->dst_device + to, (const uint8_t *) copy->src_host + from, copy->width)
                    : to_host((uint8_t *) copy->dst_host + to, copy->src_device + from, copy->width);
    }
    return end(result);
}

CUresult cuMemHostAlloc(void ** start, size_t size, unsigned flags) {
    (void) flags;
    BEGIN_IN_CONTEXT();
    const int i = FREE_SLOT(pinned);
    REQUIRE(size && i >= 0, INVALID_VALUE);
    *start = malloc(size);
    REQUIRE(*start, OUT_OF_MEMORY);
    pinned[i] = (struct pinned) { true, *start };
    return end(SUCCESS);
}

CUresult cuMemFreeHost(void * start) {
    BEGIN_IN_CONTEXT();
    for (int i = 0; i < MAX_OBJECTS; i++) {
        if (pinned[i].used && pinned[i].start == start) {
            free(start);
            pinned[i].used = false;
            return end(SUCCESS);
        }
    }
    return end(INVALID_VALUE);
}

// -- errors ----------------------------------------------------------------------------------

static const struct { int result; const char * name, * text; } RESULTS[] = {
    { SUCCESS,         "CUDA_SUCCESS",               "no error" },
    { INVALID_VALUE,   "CUDA_ERROR_INVALID_VALUE",   "invalid argument" },
    { OUT_OF_MEMORY,   "CUDA_ERROR_OUT_OF_MEMORY",   "out of memory" },
    { NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error" },
    { NO_DEVICE,       "CUDA_ERROR_NO_DEVICE",       "no CUDA-capable device is detected" },
    { INVALID_DEVICE,  "CUDA_ERROR_INVALID_DEVICE",  "invalid device ordinal" },
    { INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context" },
    { INVALID_HANDLE,  "CUDA_ERROR_INVALID_HANDLE",  "invalid resource handle" },
    { NOT_FOUND,       "CUDA_ERROR_NOT_FOUND",       "named symbol not found" },
    { LAUNCH_FAILED,   "CUDA_ERROR_LAUNCH_FAILED",   "unspecified launch failure" },
    { ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered" },
    { NOT_SUPPORTED,   "CUDA_ERROR_NOT_SUPPORTED",   "operation not supported" },
    { UNKNOWN,         "CUDA_ERROR_UNKNOWN",         "unknown error" },
};

static CUresult describe(int result, const char ** text, bool name) {
    *text = NULL;
    for (size_t i = 0; i < sizeof(RESULTS) / sizeof(RESULTS[0]); i++) {
        if (RESULTS[i].result == result) {
            *text = name ? RESULTS[i].name : RESULTS[i].text;
        }
    }
    return *text ? SUCCESS : INVALID_VALUE;
}

CUresult cuGetErrorName(CUresult result, const char ** name)   { return describe(result, name, true); }
CUresult cuGetErrorString(CUresult result, const char ** text) { return describe(result, text, false); }

// -- a backend that computes on the host ------------------------------------------------------

// may be nested; what is mapped meanwhile is seen from the next time on
void fake_cuda_compute(bool on) {
    pthread_mutex_lock(&lock);
    n_computing += on ? 1 : -1;
    if (n_computing == (on ? 1 : 0)) {
        for (int i = 0; i < MAX_OBJECTS; i++) {
            if (mappings[i].used) {
                set_host_access(&mappings[i], on);
            }
        }
    }
    pthread_mutex_unlock(&lock);
}

// -- for tests -------------------------------------------------------------------------------

#define COUNT_USED(array) do { for (int i = 0; i < MAX_OBJECTS; i++) { n += (array)[i].used; } } while (0)

// how many there are: handles, allocations, ranges, mappings, contexts, pinned, current (contexts of this thread),
// bytes (created by this process); -1 for anything else
long fake_cuda_live(const char * what) {
    long n = 0;
    pthread_mutex_lock(&lock);
    if      (strcmp(what, "handles")     == 0) { COUNT_USED(handles); }
    else if (strcmp(what, "allocations") == 0) { COUNT_USED(allocations); }
    else if (strcmp(what, "ranges")      == 0) { COUNT_USED(ranges); }
    else if (strcmp(what, "mappings")    == 0) { COUNT_USED(mappings); }
    else if (strcmp(what, "pinned")      == 0) { COUNT_USED(pinned); }
    else if (strcmp(what, "contexts")    == 0) { for (int i = 0; i < MAX_DEVICES; i++) { n += contexts[i].n_retained; } }
    else if (strcmp(what, "current")     == 0) { n = n_stack; }
    else if (strcmp(what, "bytes")       == 0) { n = (long) n_created; }
    else                                       { n = -1; }
    pthread_mutex_unlock(&lock);
    return n;
}

// how often a function was called since the start or the last reset
int fake_cuda_calls(const char * name) {
    int n = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX_FUNCTIONS; i++) {
        n += strcmp(calls[i].name, name) == 0 ? calls[i].n : 0;
    }
    pthread_mutex_unlock(&lock);
    return n;
}

void fake_cuda_reset(void) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX_OBJECTS; i++) {
        if (mappings[i].used)    { munmap(mappings[i].shadow, mappings[i].size); }
        if (ranges[i].used)      { munmap((void *) ranges[i].start, ranges[i].size); }
        if (allocations[i].used) { close(allocations[i].memfd); }
        if (pinned[i].used)      { free(pinned[i].start); }
    }
    memset(mappings, 0, sizeof(mappings));
    memset(ranges, 0, sizeof(ranges));
    memset(handles, 0, sizeof(handles));
    memset(allocations, 0, sizeof(allocations));
    memset(pinned, 0, sizeof(pinned));
    memset(contexts, 0, sizeof(contexts));
    memset(calls, 0, sizeof(calls));
    n_work = 0;
    n_created = 0;
    n_stack   = 0;
    is_ready  = false;
    n_visible = 0;
    pthread_mutex_unlock(&lock);
}
