/* Vectors and start of a bare-metal program whose output goes to the debugger (semihosting).
 * On boards with Helium the unit is switched on first. Counts instructions by SysTick. */
#include <stdint.h>

extern char __stack, __bss_start__, __bss_end__;
int main(void);
void _start(void);
void exit(int code);
void initialise_monitor_handles(void);

__attribute__((section(".vectors"), used)) static const void *vectors[16] = {
    &__stack, (const void *)_start, (const void *)_start, (const void *)_start,
    (const void *)_start,
};

void _start(void) {
    char *p;
    *(volatile uint32_t *)0xE000ED88 |= 0xFu << 20; /* CPACR: coprocessors 10 and 11 */
    __asm volatile("dsb\n isb");
    for (p = &__bss_start__; p < &__bss_end__; ++p) *p = 0;
    initialise_monitor_handles();
    exit(main());
}

void _init(void) {}
void _fini(void) {}

void _exit(int code) {
    register uint32_t r0 __asm("r0") = 0x18;
    register uint32_t r1 __asm("r1") = code ? 0x20024 : 0x20026;
    __asm volatile("bkpt 0xAB" : : "r"(r0), "r"(r1));
    for (;;) {}
}
