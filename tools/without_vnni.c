/* Hides AVX-512, AVX-VNNI, AMX and AVX10 from the libraries of a process: without_vnni.py builds
   and uses it. As LD_AUDIT, it replaces each `cpuid` of a library, before this is initialized, by
   an instruction that traps. As LD_PRELOAD, it answers the trap. WITHOUT_VNNI names a file with
   lines of a library's path and the offsets. */
#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <link.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

static const unsigned char kCpuid[] = {0x0f, 0xa2}, kTrap[] = {0x0f, 0xff};

static void answer(int number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const greg_t leaf = registers[REG_RAX], part = registers[REG_RCX];
    unsigned a, b, c, d;
    (void)number, (void)info;
    if (memcmp((void *)registers[REG_RIP], kTrap, sizeof kTrap)) {
        signal(SIGILL, SIG_DFL);
        return;
    }
    __cpuid_count((unsigned)leaf, (unsigned)part, a, b, c, d);
    if (leaf == 7 && part == 0) {
        b &= ~(1u << 16 | 1u << 17 | 1u << 21 | 7u << 26 | 3u << 30);
        c &= ~(1u << 1 | 1u << 6 | 1u << 11 | 1u << 12 | 1u << 14);
        d &= ~(1u << 2 | 1u << 3 | 1u << 8 | 15u << 22);
    } else if (leaf == 7 && part == 1) {
        a &= ~(1u << 4 | 1u << 5 | 1u << 21 | 1u << 23);
        d &= ~(1u << 4 | 1u << 5 | 1u << 8 | 1u << 10 | 1u << 19);
    }
    registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
    registers[REG_RIP] += (greg_t)sizeof kTrap;
}

int sigaction(int number, const struct sigaction *to, struct sigaction *before) {
    int (*next)(int, const struct sigaction *, struct sigaction *) = dlsym(RTLD_NEXT, "sigaction");
    return next(number, number == SIGILL ? NULL : to, before); /* faulthandler keeps out */
}

__attribute__((constructor)) static void start(void) {
    struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER};
    int (*next)(int, const struct sigaction *, struct sigaction *) = dlsym(RTLD_NEXT, "sigaction");
    next(SIGILL, &action, NULL);
}

unsigned la_version(unsigned version) { return version; }

static void replace(const struct link_map *library, unsigned long address) {
    unsigned char *at = (unsigned char *)(library->l_addr + address);
    const unsigned long within = (unsigned long)at % (unsigned long)sysconf(_SC_PAGESIZE);
    const unsigned long size = within + sizeof kTrap;
    if (mprotect(at - within, size, PROT_READ | PROT_WRITE) || memcmp(at, kCpuid, sizeof kCpuid))
        abort();
    memcpy(at, kTrap, sizeof kTrap);
    mprotect(at - within, size, PROT_READ | PROT_EXEC);
}

unsigned la_objopen(struct link_map *library, Lmid_t space, uintptr_t *cookie) {
    char path[4096], line[1 << 16], *list = getenv("WITHOUT_VNNI");
    FILE *file =
        list && library->l_name[0] && realpath(library->l_name, path) ? fopen(list, "r") : NULL;
    (void)space, (void)cookie;
    while (file && fgets(line, sizeof line, file)) {
        if (strcmp(strtok(line, "\t\n"), path)) continue;
        for (char *each; (each = strtok(NULL, "\t\n"));) replace(library, strtoul(each, NULL, 16));
    }
    if (file) fclose(file);
    return 0;
}
